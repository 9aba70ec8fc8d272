"""UCX remembers for good in which namespaces its process is, and a restored process is in others.

Two processes that remember different pid namespaces are strangers to UCX, on whatever host they
are: no CUDA IPC, "UCX endpoint create failed". An image is taken in a pid namespace that is gone
when it is restored, so before anything of UCX is made in a life, what it remembers is put right.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from dynamo_elastic.errors import ResourceMissing

KINDS: Mapping[str, int] = {"ipc": 0, "pid": 3}
"""Those that UCX compares with a peer's: name below /proc/self/ns -> its number in UCX."""
_NAMESPACES = Path("/proc/self/ns")
_MAPS = Path("/proc/self/maps")
_WORD_BYTES = 4  # the number of a namespace fits into it

_log = logging.getLogger(__name__)


def correct_namespaces(kinds: Mapping[str, int] = KINDS) -> int:
    """Every UCX library of this process knows its namespaces as they are now; the number of values
    that it did not know right. Raises ResourceMissing if one can't be put right."""
    corrected = 0
    for path, spans in _libraries().items():
        library = ctypes.CDLL(path)
        known = library.ucs_sys_get_ns
        known.restype, known.argtypes = ctypes.c_uint32, [ctypes.c_int]
        for name, number in kinds.items():
            before, now = known(number), (_NAMESPACES / name).stat().st_ino
            if before == now:
                continue
            if not any(_holds(known, number, at, now) for at in _places(spans, before)):
                raise ResourceMissing(
                    f"UCX takes this process to be in {name} namespace {before}, it is in {now}",
                    remedy="boot the engine without an image",
                )
            _log.info("UCX: %s namespace %d, not %d", name, now, before)
            corrected += 1
    return corrected


def _libraries() -> dict[str, list[tuple[int, int]]]:
    """UCX's service libraries that are loaded, and their writable memory."""
    found: dict[str, list[tuple[int, int]]] = {}
    last = ""
    for line in _MAPS.read_text().splitlines():
        span, rights, _, _, inode, *path = line.split(maxsplit=5)
        name = os.path.basename(path[0]) if path else ""
        if name.startswith(("libucs-", "libucs.")):
            last = path[0]
            found.setdefault(last, [])
        elif inode != "0" or path:
            last = ""
        # What follows the file without a name is its memory that starts with zeros.
        if last and rights.startswith("rw"):
            begin, end = (int(side, 16) for side in span.split("-"))
            found[last].append((begin, end))
    return found


def _places(spans: list[tuple[int, int]], value: int) -> Iterator[int]:
    """Addresses in `spans` at which `value` is."""
    wanted = value.to_bytes(_WORD_BYTES, "little")
    for begin, end in spans:
        memory = ctypes.string_at(begin, end - begin)
        at = memory.find(wanted)
        while at >= 0:
            if at % _WORD_BYTES == 0:
                yield begin + at
            at = memory.find(wanted, at + 1)


def _holds(known: ctypes._NamedFuncPointer, number: int, address: int, now: int) -> bool:
    """True if what UCX knows is at `address`: it is `now` from then on. If not, nothing changed."""
    word = ctypes.c_uint32.from_address(address)
    before = word.value
    word.value = now
    if known(number) == now:
        return True
    word.value = before
    return False
