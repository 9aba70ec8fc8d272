"""What the bytes of an image are: told by CRIU's own index files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.snapshot.criu_images import first_number
from dynamo_elastic.snapshot.process import HostMemory

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
    indexes = directory.glob(f"{_SHARED}*.img")
    shared = sum(memory.get(f"pages-{first_number(path)}.img", 0) for path in indexes)
    private = sum(memory.values()) - shared
    cuda_shared = min(shared, max(0, gained.shared_bytes))
    cuda_private = min(private, max(0, gained.private_bytes))
    return ImageSizes(
        private_bytes=private - cuda_private,
        shared_bytes=shared - cuda_shared,
        cuda_bytes=cuda_shared + cuda_private,
        other_bytes=total - private - shared,
    )
