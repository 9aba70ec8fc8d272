"""Memory that we fill in place of CRIU: every byte, before anything runs, or nothing is left."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamo_elastic.errors import ImagerError, SnapshotInUse
from dynamo_elastic.failpoints import KILL_AT, set_hook
from dynamo_elastic.snapshot.base import BOOT_LOG
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import OVERRIDE, Criu, find_criu
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import PidNamespace, create_namespace
from dynamo_elastic.snapshot.process import kill_tree, tree_of
from dynamo_elastic.testing.snapshot_world import SnapshotWorld

pytestmark = [pytest.mark.root, pytest.mark.criu]

MEMORY = """
import ctypes, hashlib, json, mmap, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
P = mmap.PAGESIZE
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
maps = [mmap.mmap(-1, 200 * P, flags=private)]
at = ctypes.addressof(ctypes.c_char.from_buffer(maps[0]))
maps[0][:] = os.urandom(200 * P)
# Pages in a row of several mappings: read only, not readable, given back.
libc.mprotect(ctypes.c_void_p(at + 50 * P), 20 * P, 1)
libc.mprotect(ctypes.c_void_p(at + 100 * P), 7 * P, 0)
libc.madvise(ctypes.c_void_p(at + 150 * P), 20 * P, 4)
maps.append(mmap.mmap(-1, 5 << 20, flags=private))
maps[1][:] = os.urandom(5 << 20)
maps.append(mmap.mmap(-1, 64 * P, flags=private))
for page in range(0, 64, 2):
    maps[2][page * P] = page
maps.append(mmap.mmap(-1, 16 * P))  # shared with the child: CRIU fills it
maps[3][:] = os.urandom(16 * P)
child = os.fork()
if child == 0:
    maps[1][P:3 * P] = os.urandom(2 * P)
name = os.path.dirname(sys.argv[1]) + ("/parent" if child else "/child")
def digest(*_):
    libc.mprotect(ctypes.c_void_p(at + 100 * P), 7 * P, 3)
    with open(name + ".tmp", "a") as file:
        file.write(hashlib.sha256(b"".join(m[:] for m in maps)).hexdigest() + "\\n")
    libc.mprotect(ctypes.c_void_p(at + 100 * P), 7 * P, 0)
    os.rename(name + ".tmp", name)
signal.signal(signal.SIGUSR1, digest)
digest()
threading.Thread(target=threading.Event().wait, daemon=True).start()
if child:
    other = os.path.dirname(sys.argv[1]) + "/child"
    while not os.path.exists(other):
        time.sleep(0.01)
    found = {kind: open(path).read().strip() for kind, path in [("parent", name), ("child", other)]}
    os.unlink(name)
    os.unlink(other)
    with open(sys.argv[1] + ".tmp", "w") as file:
        json.dump(found, file)
    os.rename(sys.argv[1] + ".tmp", sys.argv[1])
while True:  # not pause(): the thread may be the one that gets the signal
    time.sleep(0.01)
"""
"""Writes digests of its memory and its child's into its ready file, and again at SIGUSR1."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SnapshotWorld]:
    criu = Criu.find()
    assert criu.page_server
    world = SnapshotWorld(tmp_path, criu, real=True, tree=True)
    yield world
    world.close()


@pytest.fixture
def namespace() -> Iterator[PidNamespace]:
    namespace = create_namespace()
    yield namespace
    namespace.end(timeout_s=10)


@pytest.fixture
def manifest(world: SnapshotWorld) -> Manifest:
    return world.take(MEMORY)


@contextmanager
def at(step: str, act: Callable[[], object]) -> Iterator[None]:
    def hook(name: str) -> None:
        if name == step:
            act()

    set_hook(hook)
    try:
        yield
    finally:
        set_hook(None)


def states(namespace: PidNamespace) -> set[str]:
    stats = (Path(f"/proc/{p.pid}/stat").read_text() for p in namespace.processes())
    return {text.rpartition(")")[2].split()[0] for text in stats}


def digests(world: SnapshotWorld, pid: int) -> dict[str, str]:
    """What the restored processes find in their memory."""
    found = {}
    for member, kind in zip(tree_of(pid), ("parent", "child"), strict=True):
        os.kill(member, signal.SIGUSR1)
        path = world.control_dir / kind
        deadline = time.monotonic() + 10
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found[kind] = path.read_text().strip()
        path.unlink()
    return found


def restored_again(world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace) -> bool:
    """Whether the image still gives what went into it."""
    restored = world.restore(manifest, namespace)
    right = digests(world, restored.process.pid) == manifest.engine
    kill_tree(restored.process.pid, timeout_s=10)
    return right


def test_every_byte_of_every_mapping_of_a_tree(
    world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace
) -> None:
    assert restored_again(world, manifest, namespace)
    assert restored_again(world, manifest, namespace)


@pytest.mark.parametrize("step", ["restore.before_fill", "restore.filled"])
def test_nothing_runs_before_its_memory_is_whole(
    world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace, step: str
) -> None:
    seen: list[set[str]] = []
    with at(step, lambda: seen.append(states(namespace))):
        restored = world.restore(manifest, namespace)
    assert seen == [{"T"}]
    assert states(namespace) <= {"S", "R"}
    kill_tree(restored.process.pid, timeout_s=10)


def cut_pages(world: SnapshotWorld, manifest: Manifest) -> None:
    for path in world.catalog.directory(manifest.image_id).glob("pages-*.img"):
        os.truncate(path, path.stat().st_size // 2)


def test_pages_that_can_not_be_read_any_more(
    world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace
) -> None:
    with (
        at("restore.before_fill", lambda: cut_pages(world, manifest)),
        pytest.raises(ImagerError, match=r"page server .*Bad address"),
    ):
        world.restore(manifest, namespace)
    assert namespace.processes() == ()


def test_process_that_dies_while_it_is_filled(
    world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace
) -> None:
    def kill() -> None:
        kill_tree(namespace.processes()[0].pid, timeout_s=10)

    with at("restore.before_fill", kill), pytest.raises(ImagerError, match="No such process"):
        world.restore(manifest, namespace)
    assert namespace.processes() == ()
    assert restored_again(world, manifest, namespace)


def test_image_stays_while_pages_are_missing(
    world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace
) -> None:
    refused: list[str] = []

    def remove() -> None:
        try:
            world.catalog.remove(manifest.image_id)
        except SnapshotInUse as exc:
            refused.append(str(exc))

    with at("restore.before_fill", remove):
        restored = world.restore(manifest, namespace)
    assert len(refused) == 1
    assert digests(world, restored.process.pid) == manifest.engine


@pytest.mark.parametrize("name", ["pagemap-1000.img", "pstree.img"])
def test_index_that_makes_no_sense(
    world: SnapshotWorld,
    manifest: Manifest,
    namespace: PidNamespace,
    tmp_path: Path,
    name: str,
) -> None:
    path = world.catalog.directory(manifest.image_id) / name
    path.write_bytes(path.read_bytes()[:-3])
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(ImagerError):  # beneath the digests, which would have told
        world.imager.restore(path.parent, namespace, work_dir=work, timeout_s=20)
    assert namespace.processes() == ()


def criu_that_ends(directory: Path, hook: str) -> Criu:
    """One that is killed at `hook`, which is one of its own."""
    script, criu = directory / "hook.sh", directory / "criu.sh"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != {hook} ] || kill -9 $PPID\n')
    criu.write_text(f'#!/bin/sh\nexec {find_criu({})} "$@" --action-script {script}\n')
    for path in (script, criu):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Criu(criu, Criu.find().version(), page_server=True)


@pytest.mark.parametrize("hook", ["pre-restore", "post-restore", "pre-resume"])
def test_criu_dies_with_pages_outstanding(
    world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace, tmp_path: Path, hook: str
) -> None:
    whole = world.imager
    world.imager = criu_that_ends(tmp_path, hook)
    with pytest.raises(ImagerError):
        world.restore(manifest, namespace)
    deadline = time.monotonic() + 10
    while namespace.processes() and time.monotonic() < deadline:
        time.sleep(0.01)  # the script that killed CRIU is ending, too
    assert namespace.processes() == ()
    world.imager = whole
    assert restored_again(world, manifest, namespace)


AGENT = """
import sys
from pathlib import Path
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.namespace import PidNamespace
from dynamo_elastic.snapshot.process import identify
arm_from_environment()
images, work, init = sys.argv[1:]
namespace = PidNamespace(identify(int(init)))
Criu.find().restore(Path(images), namespace, work_dir=Path(work), timeout_s=20)
"""


@pytest.mark.parametrize("step", ["restore.before_fill", "restore.filled"])
def test_whoever_fills_is_killed(
    world: SnapshotWorld, manifest: Manifest, namespace: PidNamespace, tmp_path: Path, step: str
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (world.control_dir / BOOT_LOG).touch(0o600)
    images = world.catalog.directory(manifest.image_id)
    argv = [sys.executable, "-c", AGENT, str(images), str(work), str(namespace.init.pid)]
    environment = {**os.environ, KILL_AT: step, OVERRIDE: str(find_criu({}))}
    done = subprocess.run(argv, env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    # What it left never runs: its successor ends it like every other stray.
    assert states(namespace) == {"T"}
    for process in namespace.processes():
        kill_tree(process.pid, timeout_s=10)
    assert Catalog(world.catalog.root).findings(manifest.image_id) == ()
    assert restored_again(world, manifest, namespace)
