"""A process with descendants as one engine: looked at, imaged, restored and ended as a whole."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_elastic.errors import NotQuiescent
from dynamo_elastic.snapshot.base import PIDS_PER_SLOT, Command, first_pid
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.fingerprint import read_fingerprint
from dynamo_elastic.snapshot.inspect_process import Allowed, check_quiescent
from dynamo_elastic.snapshot.namespace import temporary_namespace
from dynamo_elastic.snapshot.process import alive, identify, kill_session, tree_of
from dynamo_elastic.snapshot.restore import restore_snapshot
from dynamo_elastic.snapshot.take import TakeRequest, take_snapshot

pytestmark = [pytest.mark.root, pytest.mark.criu]

TREE = """
import json, mmap, os, pathlib, signal, socket, sys, time
control = pathlib.Path(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(control / "s"))
listener.listen()
memory_path = f"/dev/shm/tree-{os.getpid()}-{time.time_ns()}"
with open(memory_path, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    kept = os.dup(file.fileno())
if os.fork() == 0:
    inside = socket.socket(socket.AF_UNIX)
    inside.connect(str(control / "s"))
    while True:
        inside.sendall(inside.recv(1) + memory[:1])
outside, _ = listener.accept()
if len(sys.argv) < 3:
    os.unlink(memory_path)
os.unlink(control / "s")
memory[:1] = b"m"
(control / ".ready").write_text(json.dumps({"memory": memory_path}))
os.rename(control / ".ready", control / "ready.json")
while not (control / "go").exists():
    time.sleep(0.01)
outside.sendall(b"p")
(control / ".said").write_text(outside.recv(2).decode())
os.rename(control / ".said", control / "said")
time.sleep(600)
"""


def request(directory: Path, *, tree: bool) -> TakeRequest:
    control_dir = directory / "control"
    argv = (sys.executable, "-I", "-S", "-c", TREE, str(control_dir))
    fingerprint = read_fingerprint(
        criu=Criu.find().version(),
        argv=argv,
        environment={},
        model="",
        slot=0,
        control_dir=control_dir,
    )
    pids = range(first_pid(0), first_pid(0) + PIDS_PER_SLOT)
    return TakeRequest(
        slot=0,
        command=Command(argv, {}, control_dir / "boot.log"),
        control_dir=control_dir,
        ready_file="ready.json",
        allowed=Allowed((control_dir,), lambda _: True, pids, tree=tree),
        fingerprint=fingerprint,
        boot_timeout_s=30,
        dump_timeout_s=30,
        max_bytes=1 << 30,
    )


def wait_for(path: Path, *, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def test_a_tree_is_refused_unless_trees_are_allowed(tmp_path: Path) -> None:
    with pytest.raises(NotQuiescent) as refused:
        take_snapshot(
            request(tmp_path, tree=False),
            catalog=Catalog(tmp_path / "images"),
            imager=Criu.find(),
            make_namespace=temporary_namespace,
        )
    found = "\n".join(refused.value.findings)
    assert "child process" in found
    assert "unix socket" in found
    assert "/dev/shm/tree-" in found


def test_two_copies_of_a_tree_share_nothing(tmp_path: Path) -> None:
    """Each copy has its own memory behind the mapping, and its own connection inside."""
    asked = request(tmp_path, tree=True)
    catalog, imager = Catalog(tmp_path / "images"), Criu.find()
    manifest = take_snapshot(
        asked, catalog=catalog, imager=imager, make_namespace=temporary_namespace
    )
    assert len(manifest.thread_ids) == 2
    assert not Path(manifest.engine["memory"]).exists()
    directories = [tmp_path / name for name in ("a", "b")]
    for directory in directories:
        directory.mkdir()
    with (
        temporary_namespace({asked.control_dir: directories[0]}) as first,
        temporary_namespace({asked.control_dir: directories[1]}) as second,
    ):
        copies = [
            restore_snapshot(
                manifest,
                here=asked.fingerprint,
                catalog=catalog,
                imager=imager,
                namespace=namespace,
                timeout_s=30,
            ).process
            for namespace in (first, second)
        ]
        for directory in directories:
            (directory / "go").touch()
        for directory in directories:
            wait_for(directory / "said")
            assert (directory / "said").read_text() == "pm"
        trees = [tree_of(copy.pid) for copy in copies]
        assert [len(tree) for tree in trees] == [2, 2]
        kill_session(copies[0], timeout_s=5)
        assert [identify(pid) for pid in trees[0]] == [None, None]
        assert alive(copies[1])
        check_quiescent(copies[1], asked.allowed)


def test_what_is_left_of_a_session_ends_after_its_leader_has() -> None:
    script = "sleep 600 & echo $!; read -r go"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["sh", "-c", script], stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as shell:
        leader = identify(shell.pid)
        assert shell.stdin is not None
        assert shell.stdout is not None
        left = int(shell.stdout.readline())
        shell.stdin.close()
        shell.wait(10)
    orphan = identify(left)
    assert leader is not None
    assert orphan is not None
    kill_session(leader, timeout_s=5)
    assert not alive(orphan)
    kill_session(leader, timeout_s=5)
