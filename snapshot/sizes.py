"""What the bytes of an image are: told by CRIU's own index files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import SnapshotError
from dynamo_elastic.snapshot.process import HostMemory

_HEAD = 12
"""Two magic words and the length of the first entry, which is one field: the number of a file."""
_FIELD_1_VARINT = 0x08
_SHARED = "pagemap-shmem-"


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Bytes of an image by kind; together they are its size."""

    private_bytes: int = 0
    """Memory of the processes alone."""
    shared_bytes: int = 0
    """Content of memfds and shared memory."""
    cuda_bytes: int = 0
    """Host memory that the processes gained as they left the GPU: what was on it."""
    other_bytes: int = 0
    """Everything but memory."""


def image_sizes(directory: Path, gained: HostMemory) -> ImageSizes:
    """Of the image in `directory`. `gained`: see ImageSizes.cuda_bytes; it is taken off the other
    kinds of memory, and never more than the image has of them. Raises SnapshotError if the index is
    none of CRIU's."""
    total = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    memory = {path.name: path.stat().st_size for path in directory.glob("pages-*.img")}
    shared_files = {_pages_file(path) for path in directory.glob(f"{_SHARED}*.img")}
    shared = sum(size for name, size in memory.items() if name in shared_files)
    private = sum(memory.values()) - shared
    cuda_shared = min(shared, max(0, gained.shared_bytes))
    cuda_private = min(private, max(0, gained.private_bytes))
    return ImageSizes(
        private_bytes=private - cuda_private,
        shared_bytes=shared - cuda_shared,
        cuda_bytes=cuda_shared + cuda_private,
        other_bytes=total - private - shared,
    )


def _pages_file(index: Path) -> str:
    """Name of the file with the pages that `index` describes."""
    data = index.read_bytes()[_HEAD : _HEAD + 6]
    if not data or data[0] != _FIELD_1_VARINT:
        raise SnapshotError(f"{index}: not an index of pages as this CRIU writes them")
    return f"pages-{_varint(data[1:])}.img"


def _varint(data: bytes) -> int:
    value = 0
    for position, byte in enumerate(data):
        value |= (byte & 0x7F) << (7 * position)
        if not byte & 0x80:
            break
    return value
