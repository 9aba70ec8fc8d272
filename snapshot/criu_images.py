"""The little that we read in CRIU's own image files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import SnapshotError

PROCESSES = "pstree.img"

_HEAD_BYTES = 8
"""Two magic words."""
_LENGTH_BYTES = 4
"""Before each entry."""
_NUMBER_BITS = 70
"""No number is longer, in steps of 7."""
_PAGE_BYTES = 4096
_PARENT, _LAZY, _PRESENT = 1, 2, 4
"""Flags of pages: they are in another image; memory of the process alone; they are in the file."""


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages that follow each other in a process's memory and in the file of pages. `offset`: of the
    first of them in the file, in bytes."""

    address: int
    size_bytes: int
    offset: int


def first_number(path: Path) -> int:
    """Field 1 of the first entry: the file of pages that an index belongs to, the pid of the root
    of a process tree. Raises SnapshotError if there is none, OSError if there is no such file."""
    for numbers in _entries(path):
        if 1 in numbers:
            return numbers[1]
        break
    raise _strange(path)


def own_pids(directory: Path) -> set[int]:
    """Of the processes that have memory of their own in the image."""
    names = (path.stem.removeprefix("pagemap-") for path in directory.glob("pagemap-*.img"))
    return {int(name) for name in names if name.isdigit()}


def pages_file(directory: Path, pid: int) -> Path:
    """The file with the pages of a process. Raises like first_number()."""
    return directory / f"pages-{first_number(_index(directory, pid))}.img"


def own_pages(directory: Path, pid: int) -> list[PageRange]:
    """What CRIU leaves to its page server to fill (`--lazy-pages`): memory of that process alone,
    but for its stack; by address. Raises like first_number()."""
    path = _index(directory, pid)
    entries = _entries(path)
    next(entries, None)  # the number of the file
    ranges = []
    offset = 0
    for numbers in entries:
        flags = numbers.get(4, _PRESENT)
        size = _PAGE_BYTES * (numbers.get(5) or numbers.get(2, 0))
        if 1 not in numbers or flags & _PARENT or not flags & _PRESENT:
            raise _strange(path)
        if flags & _LAZY:
            ranges.append(PageRange(numbers[1], size, offset))
        offset += size
    return ranges


def _index(directory: Path, pid: int) -> Path:
    return directory / f"pagemap-{pid}.img"


def _entries(path: Path) -> Iterator[dict[int, int]]:
    """Field -> number, of each entry; fields that are no numbers end it."""
    data = path.read_bytes()
    at = _HEAD_BYTES
    while at < len(data):
        start = at + _LENGTH_BYTES
        end = start + int.from_bytes(data[at:start], "little")
        if end > len(data):
            raise _strange(path)
        yield _numbers(data, start, end)
        at = end


def _numbers(data: bytes, at: int, end: int) -> dict[int, int]:
    found = {}
    while at < end:
        key, at = _varint(data, at, end)
        if key & 7:
            break
        found[key >> 3], at = _varint(data, at, end)
    return found


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and where the next one is."""
    value = shift = 0
    while at < end and shift < _NUMBER_BITS:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
        shift += 7
    return value, at


def _strange(path: Path) -> SnapshotError:
    return SnapshotError(f"{path}: not an image file as this CRIU writes them")
