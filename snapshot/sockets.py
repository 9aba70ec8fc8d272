"""What the sockets of a process are, for messages that name them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from dynamo_elastic.snapshot.process import PROC

_TCP_STATES = {"01": "established", "0A": "listening"}
_LISTENING_UNIX = 0x10000  # __SO_ACCEPTCON
_OTHERS = ("netlink", "packet", "raw", "raw6")
_INODE = {"netlink": 9, "packet": 8, "raw": 9, "raw6": 9}
"""Column of the inode in /proc/net/KIND."""


def socket_names(pid: int) -> dict[str, str]:
    """Inode -> kind, state and address, of all sockets in the network namespace of `pid`."""
    net = PROC / str(pid) / "net"
    return dict(
        [
            *_inet(net / "tcp", "TCP"),
            *_inet(net / "tcp6", "TCP"),
            *_inet(net / "udp", "UDP"),
            *_inet(net / "udp6", "UDP"),
            *_unix(net / "unix"),
            *(found for kind in _OTHERS for found in _other(net / kind, kind)),
        ]
    )


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:
        return  # a kind that this kernel does not have
    for line in lines:
        yield line.split()


def _inet(path: Path, kind: str) -> Iterator[tuple[str, str]]:
    for row in _rows(path):
        local, remote, inode = _address(row[1]), _address(row[2]), row[9]
        state = _TCP_STATES.get(row[3], "") if kind == "TCP" else ""
        peer = f" to {remote}" if state == "established" else ""
        article = "an" if state == "established" else "a"
        yield inode, " ".join(f"{article} {state} {kind} socket {local}{peer}".split())


def _address(text: str) -> str:
    """'0100007F:1F90' is 127.0.0.1:8080: words of 32 bits in the machine's order."""
    raw, _, port = text.partition(":")
    words = [int(raw[i : i + 8], 16) for i in range(0, len(raw), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"


def _unix(path: Path) -> Iterator[tuple[str, str]]:
    for row in _rows(path):
        state = "listening " if int(row[3], 16) & _LISTENING_UNIX else ""
        name = f" {row[7]}" if len(row) > 7 else ""
        yield row[6], f"a {state}unix socket{name}"


def _other(path: Path, kind: str) -> Iterator[tuple[str, str]]:
    for row in _rows(path):
        yield row[_INODE[kind]], f"a {kind} socket"
