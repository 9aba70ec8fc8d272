"""Pids of images: kept free of running engines' threads, and a clash is named."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.rehearse import rehearse
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import PidClash, ResourceMissing
from dynamo_elastic.snapshot.base import Command
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.locks import remove_abandoned
from dynamo_elastic.snapshot.namespace import PidNamespace, temporary_namespace
from dynamo_elastic.snapshot.process import ProcessRef, alive, threads_of
from dynamo_elastic.testing.deployments import deployment, standin_argv

pytestmark = pytest.mark.root

FIRST = 5000
THREADS, BATCH = 25_000, 2_500
CHURN = f"""
import os, sys, threading, time
lowest = 1 << 30
def look():
    global lowest
    lowest = min(lowest, threading.get_native_id())
for number in range({THREADS // BATCH}):
    while not os.path.exists(sys.argv[1] + f"/go-{{number}}"):
        time.sleep(0.002)
    for _ in range({BATCH}):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    open(sys.argv[1] + f"/done-{{number}}.tmp", "w").write(str(lowest))
    os.rename(sys.argv[1] + f"/done-{{number}}.tmp", sys.argv[1] + f"/done-{{number}}")
"""
SQUAT = """
import os, sys, threading, time
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.001)
threading.Thread(target=time.sleep, args=(600,)).start()
open(sys.argv[1] + "/squats", "w").close()
time.sleep(600)
"""


@pytest.fixture
def namespace() -> Iterator[PidNamespace]:
    with temporary_namespace({}) as namespace:
        yield namespace


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentConfig]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        yield deployment(Path(directory))


def until(holds: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_python(namespace: PidNamespace, code: str, directory: Path) -> ProcessRef:
    argv = (sys.executable, "-I", "-S", "-c", code, str(directory))
    return namespace.spawn(Command(argv, {}, directory / "log"))


def inside(namespace: PidNamespace, shell: str) -> int:
    return subprocess.run(namespace.enter(["/bin/sh", "-c", shell]), check=False).returncode


@pytest.mark.parametrize("guarded", [True, False])
def test_many_threads_stay_out_of_the_ranges(
    namespace: PidNamespace, tmp_path: Path, guarded: bool
) -> None:
    outside = Path("/proc/sys/kernel/pid_max").read_text()
    # Few pids, so that they run out often; the limit is the namespace's own from Linux 6.14 on.
    inside(namespace, "echo 16384 > /proc/sys/kernel/pid_max")
    if Path("/proc/sys/kernel/pid_max").read_text() != outside:
        Path("/proc/sys/kernel/pid_max").write_text(outside)
        pytest.skip("needs a kernel whose pid_max is the namespace's")
    namespace.guard_pids(FIRST)
    run_python(namespace, CHURN, tmp_path)
    for number in range(THREADS // BATCH):
        if guarded:
            namespace.guard_pids(FIRST)
        (tmp_path / f"go-{number}").touch()
        until((tmp_path / f"done-{number}").exists)
    lowest = int((tmp_path / f"done-{number}").read_text())
    assert (lowest >= FIRST) is guarded


def test_too_few_pids_are_said(namespace: PidNamespace) -> None:
    with pytest.raises(ResourceMissing, match=r"sysctl kernel\.pid_max"):
        namespace.guard_pids(4_194_000)


@pytest.mark.criu
def test_thread_in_the_way_is_named_and_spared(
    config: DeploymentConfig, namespace: PidNamespace, tmp_path: Path
) -> None:
    images = Images(
        config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv("--mb", "1")
    )
    manifest = images.create(0)
    assert manifest.root_pid in manifest.thread_ids
    namespace.guard_pids(FIRST)
    squatter = run_python(namespace, SQUAT, tmp_path)
    # Engines have no right to choose a pid. The shell starts no process of its own here.
    inside(namespace, f"echo 999 > /proc/sys/kernel/ns_last_pid; : > {tmp_path}/go")
    until((tmp_path / "squats").exists)
    assert 1000 in threads_of(squatter.pid)
    holder = f"pid 1000 is a thread of process {squatter.pid} "
    with pytest.raises(PidClash, match=holder) as caught:
        images.restore_image(manifest, namespace, timeout_s=20)
    assert caught.value.pid == 1000
    with pytest.raises(PidClash):
        images.restore(0, namespace, timeout_s=20)
    assert alive(squatter)
    # It is not the image's fault, and elsewhere it runs.
    assert images.quarantined() == {}
    asyncio.run(rehearse(images, manifest, timeout_s=30))


@pytest.mark.criu
@pytest.mark.parametrize("phase", ["boot", "dump"])
def test_killed_create_leaves_nothing_alive(config: DeploymentConfig, phase: str) -> None:
    directory = config.run_dir.parent
    code = f"""
import os, signal, sys, tempfile, threading
from pathlib import Path
from dynamo_elastic.agent.images import Images
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.testing.deployments import deployment, standin_argv
tempfile.tempdir = sys.argv[1]
config = deployment(Path(sys.argv[1]))
images = Images(config, Criu.find(), Catalog(config.snapshot.catalog), standin_argv("--mb", "1"))
def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
def show(slot, phase):
    if phase.value == {phase!r}:
        Criu.dump = killed
        threading.Timer(0.3, killed).start()
images.create(0, show)
"""
    done = subprocess.run([sys.executable, "-c", code, str(directory)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not _processes_of(directory), 10)
    catalog = Catalog(config.snapshot.catalog)
    assert catalog.entries() == {}
    catalog.remove_partials()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        assert len(remove_abandoned()) == 1
    assert not list(directory.glob("dynamo-elastic-work-*"))


def _processes_of(directory: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(directory) in text and str(os.getpid()) not in str(path):
            found.append(text)
    return found
