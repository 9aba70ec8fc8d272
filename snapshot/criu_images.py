"""The little that we read in CRIU's own image files."""

from __future__ import annotations

from pathlib import Path

from dynamo_elastic.errors import SnapshotError

PROCESSES = "pstree.img"

_HEAD = 12
"""Two magic words, and the length of the first entry."""
_FIELD_1_VARINT = 0x08
_VARINT_BYTES = 5


def first_number(path: Path) -> int:
    """Field 1 of the first entry: the file of pages that an index belongs to, the pid of the root
    of a process tree. Raises SnapshotError if there is none, OSError if there is no such file."""
    with path.open("rb") as file:
        data = file.read(_HEAD + 1 + _VARINT_BYTES)[_HEAD:]
    if not data or data[0] != _FIELD_1_VARINT:
        raise SnapshotError(f"{path}: not an image file as this CRIU writes them")
    value = 0
    for position, byte in enumerate(data[1:]):
        value |= (byte & 0x7F) << (7 * position)
        if not byte & 0x80:
            break
    return value
