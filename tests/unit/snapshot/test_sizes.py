"""Bytes of an image by kind, from index files as CRIU writes them."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.errors import SnapshotError
from dynamo_elastic.snapshot.process import HostMemory
from dynamo_elastic.snapshot.sizes import ImageSizes, image_sizes


def index(number: int) -> bytes:
    """Of pages-NUMBER.img."""
    varint = bytearray()
    while number > 0x7F:
        varint.append(number & 0x7F | 0x80)
        number >>= 7
    varint.append(number)
    entry = b"\x08" + bytes(varint)
    return struct.pack("<III", 0x54564319, 0x56084025, len(entry)) + entry + b"\x05\0\0\0\x08\x01"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "pagemap-1000.img").write_bytes(index(300))
    (tmp_path / "pages-300.img").write_bytes(bytes(5000))
    (tmp_path / "pagemap-shmem-7.img").write_bytes(index(1))
    (tmp_path / "pages-1.img").write_bytes(bytes(3000))
    (tmp_path / "pagemap-shmem-200.img").write_bytes(index(2))
    (tmp_path / "pages-2.img").write_bytes(bytes(1000))
    (tmp_path / "core-1000.img").write_bytes(bytes(100))
    return tmp_path


def total(sizes: ImageSizes) -> int:
    return sizes.private_bytes + sizes.shared_bytes + sizes.cuda_bytes + sizes.other_bytes


def test_kinds(image: Path) -> None:
    sizes = image_sizes(image, HostMemory(0, 0))
    assert (sizes.private_bytes, sizes.shared_bytes, sizes.cuda_bytes) == (5000, 4000, 0)
    assert 100 < sizes.other_bytes < 200


def test_what_came_from_the_gpu_is_told_apart(image: Path) -> None:
    sizes = image_sizes(image, HostMemory(private_bytes=500, shared_bytes=2500))
    assert (sizes.private_bytes, sizes.shared_bytes, sizes.cuda_bytes) == (4500, 1500, 3000)


@given(st.integers(-9000, 9000), st.integers(-9000, 9000))
def test_kinds_add_up_whatever_was_measured(private: int, shared: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "pagemap-shmem-7.img").write_bytes(index(1))
        (directory / "pages-1.img").write_bytes(bytes(3000))
        (directory / "pages-2.img").write_bytes(bytes(2000))
        sizes = image_sizes(directory, HostMemory(private, shared))
        assert total(sizes) == sum(path.stat().st_size for path in directory.iterdir())
        assert min(sizes.private_bytes, sizes.shared_bytes, sizes.cuda_bytes) >= 0


def test_index_of_another_make_is_an_error(image: Path) -> None:
    (image / "pagemap-shmem-7.img").write_bytes(b"short")
    with pytest.raises(SnapshotError, match="pagemap-shmem-7"):
        image_sizes(image, HostMemory(0, 0))
