"""A process that is killed at any step leaves whole images, and leftovers that are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_elastic.errors import SnapshotDamaged, SnapshotNotFound
from dynamo_elastic.failpoints import KILL_AT
from dynamo_elastic.snapshot.archive import export_image, import_image
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.signing import Trust, host_key
from dynamo_elastic.testing.snapshots import publish_image

ACT = """
import sys
from pathlib import Path
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.snapshot.archive import export_image, import_image
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.prune import Bounds, Judgement, prune
from dynamo_elastic.testing.snapshots import publish_image
from dynamo_elastic.snapshot.signing import Trust, host_key
root, archive = Path(sys.argv[1]), Path(sys.argv[2])
trusted = (archive.with_name("other.key.pub"),)
catalog = Catalog(root, Trust(host_key(root), make=True, trusted_keys=trusted))
arm_from_environment()
{act}
"""
ACTS = {
    "publish": "publish_image(catalog, 'slot0-new', at='9')",
    "remove": "catalog.remove('slot0-old')",
    "prune": "prune(catalog, Bounds(1, 1, 1e9), lambda m: Judgement(True, ''))",
    "import": "import_image(catalog, archive)",
    "export": "export_image(catalog, 'slot0-old', archive.with_name('half.tar'))",
}
POINTS = [
    ("publish", "catalog.publish.begin"),
    ("publish", "catalog.publish.manifest_written"),
    ("publish", "catalog.publish.before_rename"),
    ("publish", "catalog.publish.renamed"),
    ("remove", "catalog.remove.before_rename"),
    ("remove", "catalog.remove.renamed"),
    ("remove", "catalog.remove.deleted"),
    ("prune", "catalog.remove.renamed"),
    ("prune", "catalog.partials.before_removal"),
    ("import", "catalog.import.before_file"),
    ("import", "catalog.import.extracted"),
    ("import", "catalog.publish.manifest_written"),
    ("import", "catalog.publish.renamed"),
]
BEFORE = {"slot0-old", "slot1-kept"}
AFTER = {
    "publish": {"slot0-old", "slot1-kept", "slot0-new"},
    "remove": {"slot1-kept"},
    "prune": set[str](),
    "import": {"slot0-old", "slot1-kept", "slot0-moved"},
}


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    trusted = (tmp_path / "other.key.pub",)
    own = host_key(tmp_path / "images")
    catalog = Catalog(tmp_path / "images", Trust(own, make=True, trusted_keys=trusted))
    other = Catalog(tmp_path / "other")
    publish_image(other, "slot0-moved", at="3")
    publish_image(catalog, "slot0-old", at="1")
    publish_image(catalog, "slot1-kept", slot=1, at="2")
    export_image(other, "slot0-moved", tmp_path / "archive.tar")
    (catalog.root / ".partial-slot9-dead").mkdir(mode=0o700)
    return catalog


def run(act: str, catalog: Catalog, point: str) -> int:
    code = ACT.format(act=ACTS[act])
    archive = catalog.root.parent / "archive.tar"
    return subprocess.run(
        [sys.executable, "-c", code, str(catalog.root), str(archive)],
        env={**os.environ, KILL_AT: point},
        check=False,
        timeout=60,
    ).returncode


def test_what_a_killed_export_leaves_is_not_taken(catalog: Catalog) -> None:
    assert run("export", catalog, "catalog.export.before_file") == -signal.SIGKILL
    assert set(catalog.entries()) == BEFORE
    with pytest.raises(SnapshotDamaged):
        import_image(Catalog(catalog.root.parent / "other"), catalog.root.parent / "half.tar")


@pytest.mark.parametrize(("act", "point"), POINTS)
def test_killed_at(catalog: Catalog, act: str, point: str) -> None:
    assert run(act, catalog, point) == -signal.SIGKILL
    found = catalog.entries()
    # Each image is there as a whole or not at all; what the act does not concern is untouched.
    assert all(isinstance(entry, Manifest) for entry in found.values())
    assert BEFORE & AFTER[act] <= set(found) <= BEFORE | AFTER[act]
    assert all(catalog.findings(image_id) == () for image_id in found)

    # The act can be done again, by whoever comes next, and leaves nothing behind.
    for image_id in AFTER[act] - BEFORE:
        if image_id in found:
            catalog.remove(image_id)
    if act == "publish":
        publish_image(catalog, "slot0-new", at="9")
    elif act == "import":
        import_image(catalog, catalog.root.parent / "archive.tar")
    else:
        for image_id in set(catalog.entries()) - AFTER[act]:
            catalog.remove(image_id)
    catalog.remove_partials()
    assert set(catalog.entries()) == AFTER[act]
    assert {p.name for p in catalog.root.iterdir()} == AFTER[act] | {".lock"}


def test_killed_in_the_middle_of_a_deletion(catalog: Catalog) -> None:
    act = """
import os, shutil, signal
def half(path):
    next(path.iterdir()).unlink()
    os.kill(os.getpid(), signal.SIGKILL)
shutil.rmtree = half
catalog.remove("slot0-old")
"""
    archive = str(catalog.root.with_name("archive.tar"))
    argv = [sys.executable, "-c", ACT.format(act=act), str(catalog.root), archive]
    assert subprocess.run(argv, check=False, timeout=60).returncode == -signal.SIGKILL
    assert set(catalog.entries()) == {"slot1-kept"}
    assert ".partial-slot0-old" in catalog.partials()


def test_what_is_killed_lets_go_of_the_image(catalog: Catalog) -> None:
    code = """
import sys
from pathlib import Path
from dynamo_elastic.snapshot.catalog import Catalog
hold = Catalog(Path(sys.argv[1])).hold("slot0-old")
print("held", flush=True)
sys.stdin.read()
"""
    argv = [sys.executable, "-c", code, str(catalog.root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"held\n"
        with pytest.raises(Exception, match="in use"):
            catalog.remove("slot0-old")
        reader.kill()
    catalog.remove("slot0-old")
    with pytest.raises(SnapshotNotFound):
        catalog.inspect("slot0-old")
