"""What must not be in an image is refused on real processes, with the reason that names it."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_elastic.agent.boot import engine_environment
from dynamo_elastic.errors import NotQuiescent
from dynamo_elastic.snapshot.base import Command
from dynamo_elastic.snapshot.inspect_process import Allowed, check_quiescent
from dynamo_elastic.snapshot.namespace import PidNamespace, temporary_namespace
from dynamo_elastic.snapshot.process import ProcessRef, kill_and_wait

pytestmark = pytest.mark.root

PID = 1000
VICTIM = """
import ctypes, mmap, os, socket, sys, time, threading
control = sys.argv[1]
{plant}
os.rename(control + "/down", control + "/up")
time.sleep(600)
"""


@dataclass
class Victims:
    """Starts processes that hold something, each in one namespace and directory."""

    namespace: PidNamespace
    directory: Path

    def start(self, plant: str, environment: dict[str, str]) -> ProcessRef:
        (self.directory / "up").unlink(missing_ok=True)
        (self.directory / "down").touch()
        code = VICTIM.format(plant=plant)
        argv = (sys.executable, "-I", "-S", "-c", code, str(self.directory))
        command = Command(argv, environment, self.directory / "boot.log")
        process = self.namespace.spawn(command, pid=PID)
        deadline = time.monotonic() + 10
        while not (self.directory / "up").exists():
            if time.monotonic() > deadline:
                raise AssertionError((self.directory / "boot.log").read_text())
            time.sleep(0.005)
        return process

    def findings(self, plant: str, **environment: str) -> tuple[str, ...]:
        process = self.start(plant, {"PATH": "/usr/bin:/bin", **environment})
        allowed = Allowed(
            (self.directory,), {"PATH", "LC_CTYPE"}.__contains__, range(PID, PID + 20)
        )
        try:
            check_quiescent(process, allowed)
        except NotQuiescent as exc:
            return exc.findings
        finally:
            for other in self.namespace.processes():
                kill_and_wait(other, timeout_s=5)
            self.namespace.wait_reaped(PID, timeout_s=5)
        return ()


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    directory = tmp_path_factory.mktemp("victims")
    (directory / "file").write_bytes(bytes(4096))
    with temporary_namespace({}) as namespace:
        yield Victims(namespace, directory)


def test_what_an_engine_may_hold(victims: Victims) -> None:
    plant = """
log = open(control + "/boot.log", "a"); model = open(control + "/file")
own = os.pipe(); poll = __import__("select").epoll(); null = open("/dev/null")
memory = os.memfd_create("m"); shared = mmap.mmap(-1, 4096)
for _ in range(3): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
    assert victims.findings(plant) == ()


REFUSED = {
    "a listening TCP socket 127.0.0.1:": """
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()""",
    "a listening TCP socket ::1:": """
s = socket.socket(socket.AF_INET6); s.bind(("::1", 0)); s.listen()""",
    "an established TCP socket 127.0.0.1:": """
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
c = socket.create_connection(s.getsockname())""",
    "a UDP socket": """
s = socket.socket(type=socket.SOCK_DGRAM); s.bind(("127.0.0.1", 0))""",
    "a listening unix socket /": """
s = socket.socket(socket.AF_UNIX); s.bind(control + "/s"); s.listen(); os.unlink(control + "/s")""",
    "a unix socket": "a, b = socket.socketpair()",
    "a netlink socket": "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); s.bind((0, 0))",
    "io_uring can't be in an image": """
ring = ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(120))
assert ring > 0""",
    "pidfd can't be in an image": "fd = os.pidfd_open(os.getpid())",
    "a pipe to another process": "r, w = os.pipe(); os.close(r)",
    "/fuse): a device": 'd = open("/dev/fuse")',
    "/uverbs0): a device": 'd = open(control + "/uverbs0")',
    "a file outside the control directory": 'f = open("/etc/hostname")',
    "a deleted file": """
f = open(control + "/gone", "a"); os.unlink(control + "/gone")""",
    "written without O_APPEND": 'f = open(control + "/file", "r+")',
    "/file, shared with other processes": """
f = open(control + "/file", "r+"); m = mmap.mmap(f.fileno(), 4096); f.close()""",
    "/dev/shm/de-test-refusal": """
f = open("/dev/shm/de-test-refusal", "w+b"); os.unlink("/dev/shm/de-test-refusal")
f.write(bytes(4096)); f.flush(); m = mmap.mmap(f.fileno(), 4096, prot=mmap.PROT_READ); f.close()""",
    "/SYSV": """
libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p
i = libc.shmget(0, 4096, 0o1600); libc.shmat(i, None, 0); libc.shmctl(i, 0, None)""",
    "child process": """
if os.fork() == 0: time.sleep(600)""",
    "in its namespace: end it": """
if os.fork() == 0:
    if os.fork() == 0: time.sleep(600)
    os._exit(0)
os.wait()""",
    "threads (first": """
for _ in range(25): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()""",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(victims: Victims, reason: str) -> None:
    if "uverbs0" in reason:
        # A device is one wherever its node is: this has the numbers of /dev/fuse.
        os.mknod(victims.directory / "uverbs0", stat.S_IFCHR | 0o600, os.makedev(10, 229))
    found = victims.findings(REFUSED[reason])
    assert any(reason in finding for finding in found), found


def test_all_findings_come_at_once(victims: Victims) -> None:
    found = victims.findings("a, b = socket.socketpair(); f = open('/etc/hostname')")
    assert len(found) == 3


def test_secret_in_the_environment(victims: Victims) -> None:
    (finding,) = victims.findings("", API_TOKEN="hunter2")
    assert "API_TOKEN" in finding
    assert "hunter2" not in finding


def test_secrets_are_not_passed_on_whatever_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = ("UCX_TLS", "OMP_NUM_THREADS", "NCCL_DEBUG")
    kept_back = ("NVIDIA_API_KEY", "NCCL_AUTH", "CUDA_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in (*passed, *kept_back):
        monkeypatch.setenv(name, "x")
    environment = engine_environment()
    assert environment.keys() >= set(passed)
    assert environment.keys().isdisjoint(kept_back)
