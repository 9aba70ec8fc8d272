"""Whoever makes an image fails or dies at each step of it, on real CRIU: nothing is left of it, and
the next one is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.agent.images import Images
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import SnapshotError
from dynamo_elastic.failpoint_table import FAILPOINTS, Stage
from dynamo_elastic.failpoints import KILL_AT, error_at, set_hook
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.locks import remove_abandoned
from dynamo_elastic.testing.deployments import deployment, standin_argv

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.slow]

STEPS = [f.name for f in FAILPOINTS if f.stage is Stage.TAKE]
_SOON_S = 10.0

MAKER = """
import sys
from pathlib import Path
from dynamo_elastic.agent.images import Images
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.testing.deployments import deployment, standin_argv
config = deployment(Path(sys.argv[1]))
images = Images(config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv())
arm_from_environment()
images.create(0)
"""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def images_of(config: DeploymentConfig) -> Images:
    return Images(config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv())


def living(directory: Path) -> list[str]:
    """Processes and mounts that have to do with `directory`."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    lines = [*listed.stdout.splitlines(), *Path("/proc/self/mounts").read_text().splitlines()]
    return [line for line in lines if str(directory) in line]


def check_the_next_one(directory: Path) -> None:
    """Nothing is there of the last image, and another one is made."""
    assert living(directory) == []
    assert not list(directory.glob("dynamo-elastic-*"))
    images = images_of(deployment(directory))
    assert images.catalog.partials() == ()
    assert images.catalog.entries() == {}
    manifest = images.create(0)
    assert images.catalog.findings(manifest.image_id) == ()
    assert living(directory) == []


@pytest.mark.parametrize("step", STEPS)
def test_an_image_that_fails_leaves_nothing(directory: Path, step: str) -> None:
    met: list[str] = []

    def fail(name: str) -> None:
        met.append(name)
        if name == step:
            raise error_at(name)

    set_hook(fail)
    try:
        with pytest.raises(SnapshotError, match=step):
            images_of(deployment(directory)).create(0)
    finally:
        set_hook(None)
    assert met[-1] == step
    check_the_next_one(directory)


@pytest.mark.parametrize("step", STEPS)
def test_whoever_makes_an_image_is_killed(directory: Path, step: str) -> None:
    environment = {**os.environ, KILL_AT: step, "TMPDIR": str(directory)}
    argv = [sys.executable, "-c", MAKER, str(directory)]
    done = subprocess.run(argv, env=environment, timeout=80, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    deadline_s = time.monotonic() + _SOON_S
    while living(directory) and time.monotonic() < deadline_s:
        time.sleep(0.02)  # the kernel ends the namespace with its maker
    # What the next agent does when it starts.
    remove_abandoned()
    images_of(deployment(directory)).catalog.remove_partials()
    check_the_next_one(directory)
