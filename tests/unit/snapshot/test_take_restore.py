"""Taking and restoring over a fake imager: what is told, what is left after each failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.errors import (
    ImagerError,
    NotQuiescent,
    SnapshotDamaged,
    SnapshotError,
    SnapshotInUse,
    SnapshotMismatch,
)
from dynamo_elastic.snapshot.base import (
    BOOT_LOG,
    Command,
    Namespace,
    RestorePhase,
    TakePhase,
)
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.inspect_process import Allowed
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.process import ProcessRef, alive
from dynamo_elastic.snapshot.restore import Restored, restore_snapshot
from dynamo_elastic.snapshot.take import TakeRequest, take_snapshot
from dynamo_elastic.testing.imager import FakeImager, FakeNamespace
from dynamo_elastic.testing.snapshots import FINGERPRINT

READY = "ready.json"
WAIT = "import time; time.sleep(600)"
COME_UP = (
    f"import os; open('{{0}}.tmp', 'w').write('{{{{}}}}'); os.rename('{{0}}.tmp', '{{0}}'); {WAIT}"
)


class World:
    """One slot on one host, with a fake imager."""

    def __init__(self, root: Path) -> None:
        self.control_dir = root / "slot"
        self.catalog = Catalog(root / "images")
        self.imager = FakeImager()
        self.namespace = FakeNamespace()
        self.phases: list[TakePhase | RestorePhase] = []
        self.spawned: list[ProcessRef] = []
        self.max_bytes = 1 << 30
        self.here = replace(FINGERPRINT, control_dir=str(self.control_dir))

    @contextmanager
    def make_namespace(self, binds: Mapping[Path, Path]) -> Iterator[Namespace]:
        assert list(binds) == [self.control_dir]
        try:
            yield self.namespace
        finally:
            self.namespace.end(timeout_s=5)

    def take(self, code: str, *, timeout_s: float = 10.0) -> Manifest:
        code = code.format(self.control_dir / READY)
        request = TakeRequest(
            slot=0,
            command=Command(
                (sys.executable, "-I", "-S", "-c", code),
                {"PATH": "/usr/bin:/bin"},
                self.control_dir / BOOT_LOG,
            ),
            control_dir=self.control_dir,
            ready_file=READY,
            allowed=Allowed((self.control_dir,), {"PATH", "LC_CTYPE"}.__contains__),
            fingerprint=self.here,
            boot_timeout_s=timeout_s,
            dump_timeout_s=timeout_s,
            max_bytes=self.max_bytes,
        )
        return take_snapshot(
            request,
            catalog=self.catalog,
            imager=self.imager,
            make_namespace=self.make_namespace,
            notify=self.phases.append,
        )

    def restore(self, manifest: Manifest) -> Restored:
        return restore_snapshot(
            manifest,
            here=self.here,
            catalog=self.catalog,
            imager=self.imager,
            namespace=self.namespace,
            timeout_s=10.0,
            notify=self.phases.append,
        )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.namespace.end(timeout_s=5)


def test_take_tells_its_phases_and_lists_the_image_last(world: World) -> None:
    manifest = world.take(COME_UP)
    assert world.phases == list(TakePhase)[1:-1]
    assert world.catalog.inspect(manifest.image_id) == manifest
    assert manifest.timings_s.keys() >= {"boot", "inspect", "dump", "store"}
    assert manifest.fingerprint == world.here


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        ("raise SystemExit('broken model')", "broken model", SnapshotError),
        (WAIT, "not ready after", SnapshotError),
        (f"import socket; s = socket.socket(); {COME_UP}", "a socket", NotQuiescent),
        (f"import os; p = os.pipe(); os.close(p[0]); {COME_UP}", "a pipe", NotQuiescent),
        (f"f = open('/etc/passwd'); {COME_UP}", "outside the control", NotQuiescent),
        (f"import os; os.fork() or exec('{WAIT}'); {COME_UP}", "child process", NotQuiescent),
    ],
)
def test_failed_take_leaves_nothing(
    world: World, code: str, reason: str, error: type[SnapshotError]
) -> None:
    with pytest.raises(error, match=reason):
        world.take(code, timeout_s=10.0 if error is NotQuiescent or "broken" in reason else 0.3)
    assert world.phases[-1] is TakePhase.FAILED
    assert world.catalog.entries() == {}
    assert world.catalog.partials() == ()


def test_failed_dump_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(process: ProcessRef, directory: Path, *_: object, **__: object) -> None:
        world.spawned.append(process)
        (directory / "pages-1.img").write_bytes(b"half")
        raise ImagerError(["criu", "dump"], 1, "no")

    monkeypatch.setattr(world.imager, "dump", fail)
    with pytest.raises(ImagerError):
        world.take(COME_UP)
    assert world.catalog.entries() == {}
    assert world.catalog.partials() == ()
    assert not alive(world.spawned[0])


def test_restore_compares_verifies_and_runs(world: World) -> None:
    manifest = world.take(COME_UP)
    world.phases.clear()
    restored = world.restore(manifest)
    assert world.phases == list(RestorePhase)[1:-1]
    assert alive(restored.process)
    assert restored.timings_s.keys() >= {"compare", "verify", "restore"}


def test_mismatch_and_damage_run_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = world.take(COME_UP)

    def never(*_: object, **__: object) -> ProcessRef:
        raise AssertionError("the imager was asked")

    monkeypatch.setattr(world.imager, "restore", never)
    world.here = replace(world.here, model="another", kernel="9.9")
    with pytest.raises(SnapshotMismatch) as caught:
        world.restore(manifest)
    assert len(caught.value.mismatches) == 2
    assert world.phases[-2:] == [RestorePhase.COMPARE, RestorePhase.FAILED]

    world.here = manifest.fingerprint
    (world.catalog.directory(manifest.image_id) / "pages-1.img").write_bytes(b"x")
    with pytest.raises(SnapshotDamaged):
        world.restore(manifest)
    assert world.phases[-2:] == [RestorePhase.VERIFY, RestorePhase.FAILED]


def test_image_is_held_while_it_is_restored_and_then_was_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = world.take(COME_UP)
    os.utime(world.catalog.root / manifest.image_id, (1, 1))
    restore = world.imager.restore

    def meanwhile(*args: Any, **kwargs: Any) -> ProcessRef:
        with pytest.raises(SnapshotInUse):
            world.catalog.remove(manifest.image_id)
        return restore(*args, **kwargs)

    monkeypatch.setattr(world.imager, "restore", meanwhile)
    world.restore(manifest)
    assert world.catalog.last_used(manifest.image_id) > 1
    world.catalog.remove(manifest.image_id)
