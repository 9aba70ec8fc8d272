"""Makes a pid and mount namespace whose first process reaps orphans until it is killed.

Run as a file (`python -I -S namespace_init.py LIFELINE NET [SOURCE TARGET]...`), so it imports
nothing of ours: it stays small for as long as engines live. Each SOURCE is bind-mounted over its
TARGET. NET: 'own' for a network namespace with nothing but `lo`, 'shared' for the caller's.
Prints the host pid of the namespace's first process once that is ready. When that process ends,
every process of the namespace does. LIFELINE is the read end of a pipe (-1: none): the first
process ends when nobody has the pipe's other end any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
AF_INET, SOCK_DGRAM, SIOCSIFFLAGS, IFF_UP, IFREQ_BYTES = 2, 2, 0x8914, 1, 40
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
MS_BIND = 4096
MS_REC_SLAVE = 16384 | (1 << 19)

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    raw_kind = kind.encode() if kind is not None else None
    result = _libc.mount(source.encode(), target.encode(), raw_kind, ctypes.c_ulong(flags), None)
    _check(result, f"mount {source} on {target}")


def _start_loopback() -> None:
    """CRIU, for one, needs a network that can be reached."""
    fd = _libc.socket(AF_INET, SOCK_DGRAM, 0)
    name = b"lo".ljust(16, b"\0")
    request = ctypes.create_string_buffer(name + IFF_UP.to_bytes(2, sys.byteorder), IFREQ_BYTES)
    _check(_libc.ioctl(fd, SIOCSIFFLAGS, request), "lo")
    os.close(fd)


def main(argv: Sequence[str]) -> None:
    """Print the pid of the new namespace's first process and return; that process lives on."""
    own_net = argv[1] == "own"
    flags = CLONE_NEWNS | CLONE_NEWPID | (CLONE_NEWNET if own_net else 0)
    _check(_libc.unshare(flags), "unshare")
    if own_net:
        _start_loopback()
    # Slave: what the host mounts later is seen here, what is mounted here is not seen there.
    _mount("none", "/", None, MS_REC_SLAVE)
    lifeline = int(argv[0])
    for source, target in zip(argv[2::2], argv[3::2], strict=True):
        _mount(source, target, None, MS_BIND)
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready_read)
        _reap(ready_write, lifeline)
    os.close(ready_write)
    if os.read(ready_read, 1) != b"1":
        raise SystemExit("the namespace's first process did not come up")
    sys.stdout.write(f"{pid}\n")


def _reap(ready: int, lifeline: int) -> None:
    """Reap orphans for ever, or until the lifeline ends."""
    _mount("proc", "/proc", "proc", MS_NOSUID_NODEV_NOEXEC)
    os.setsid()
    os.chdir("/")
    _let_go(keep={ready, lifeline})
    poller = select.poll()
    if lifeline >= 0:
        poller.register(lifeline, 0)  # only its end is reported
    children = _child_events()
    poller.register(children, select.POLLIN)
    os.write(ready, b"1")
    os.close(ready)
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if lifeline in dict(poller.poll()):
            os._exit(0)
        with contextlib.suppress(BlockingIOError):
            os.read(children, 4096)


def _let_go(keep: set[int]) -> None:
    """Close whatever was inherited, but for `keep`."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for fd in set(range(3, 64)) - keep:
        with contextlib.suppress(OSError):
            os.close(fd)


def _child_events() -> int:
    """A descriptor that becomes readable when a child ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


if __name__ == "__main__":
    main(sys.argv[1:])
