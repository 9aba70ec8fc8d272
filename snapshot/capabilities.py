"""What of root's powers snapshots need; the agent gives up the rest before anything else runs.

The bounding set bounds whatever the agent starts, CRIU too. Engines are started without any
(namespace.py).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from dynamo_elastic.errors import ResourceMissing

_STATUS = Path("/proc/self/status")
_LAST = Path("/proc/sys/kernel/cap_last_cap")
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


class Capability(IntEnum):
    """Numbers of the kernel's."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    FOWNER = 3
    KILL = 5
    SETGID = 6
    SETUID = 7
    SETPCAP = 8
    NET_ADMIN = 12
    SYS_CHROOT = 18
    SYS_PTRACE = 19
    SYS_ADMIN = 21
    SYS_RESOURCE = 24
    SYS_TIME = 25
    CHECKPOINT_RESTORE = 40


NEEDED: Mapping[Capability, str] = {
    Capability.NET_ADMIN: "CRIU's sockets; the network of a rehearsal",
    Capability.SETPCAP: "engines without capabilities",
    Capability.SYS_ADMIN: "pid and mount namespaces; pids of a restored process",
    Capability.SYS_CHROOT: "to enter the engines' mount namespace",
    Capability.SYS_PTRACE: "CRIU's dump; CUDA checkpoints of engines; their memory, page by page",
    Capability.SYS_TIME: "the clocks of a restored process",
}
"""Without one of them there are no snapshots."""

USEFUL: Mapping[Capability, str] = {
    Capability.CHECKPOINT_RESTORE: "what kernels move there from CAP_SYS_ADMIN",
    Capability.CHOWN: "the agent's socket belongs to agent.uids and agent.gid",
    Capability.DAC_OVERRIDE: "models, certificates and control directories of other users",
    Capability.FOWNER: "modes of files that are restored",
    Capability.KILL: "engines of other users",
    Capability.SETGID: "groups of engines of other users",
    Capability.SETUID: "engines of other users",
    Capability.SYS_RESOURCE: "limits of an image that are above ours",
}
"""Kept where they are there; without them the case in question fails alone."""


def held() -> frozenset[int]:
    """Capabilities that are in force in this thread."""
    (line,) = [x for x in _STATUS.read_text().splitlines() if x.startswith("CapEff:")]
    mask = int(line.split()[1], 16)
    return frozenset(n for n in range(mask.bit_length()) if mask >> n & 1)


def check_capabilities() -> None:
    """Return if snapshots can be made and restored. Raises ResourceMissing naming what is missing,
    and what for."""
    missing = [c for c in NEEDED if c not in held()]
    if missing:
        names = "; ".join(f"CAP_{c.name} ({NEEDED[c]})" for c in missing)
        raise ResourceMissing(
            f"snapshots need {names}",
            remedy="run as root, in a container with securityContext.capabilities of "
            "docs/security.md",
        )


def confine() -> None:
    """For good, for this process and all that it starts: no capability but those above, and no
    program that gives more than it was given. Before the first thread. Without root nothing is
    there to give up."""
    kept = held() & (set(NEEDED) | set(USEFUL))
    if Capability.SETPCAP in kept:
        for number in range(int(_LAST.read_text()) + 1):
            if number not in kept:
                _check(_libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0), "bounding set")
    _set(kept)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _set(kept: frozenset[int]) -> None:
    """Permitted and effective are `kept`, inheritable is nothing."""
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    words = [sum(1 << n - base for n in kept if base <= n < base + 32) for base in (0, 32)]
    data = (ctypes.c_uint32 * 6)(*(value for word in words for value in (word, word, 0)))
    _check(_libc.capset(header, data), "capset")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise ResourceMissing(
            f"{what}: {os.strerror(ctypes.get_errno())}", remedy="run as root, or without root"
        )
