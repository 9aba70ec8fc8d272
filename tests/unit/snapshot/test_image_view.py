"""An image's CUDA sockets, renamed for the pid namespace in which it is restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_elastic.errors import SnapshotError
from dynamo_elastic.snapshot.image_view import FILES, view_for

TAKEN, HERE = 4026532350, 4026532351
PAGES = b"pages of 4026532350"


def image(root: Path, files: bytes) -> Path:
    directory = root / "image"
    directory.mkdir()
    (directory / FILES).write_bytes(files)
    (directory / "pages-1.img").write_bytes(PAGES)
    return directory


def name(namespace: int) -> bytes:
    return b"\x2a\x1b\0cuda-uvmfd-%d-1000\x30\0" % namespace


def test_sockets_are_named_by_the_namespace_they_come_to(tmp_path: Path) -> None:
    directory = image(tmp_path, b"head" + name(TAKEN) + b"/tmp/cuda-uvmfd-4026532350-1")
    view = view_for(directory, HERE, tmp_path)
    assert (view / FILES).read_bytes() == b"head" + name(HERE) + b"/tmp/cuda-uvmfd-4026532350-1"
    assert (view / "pages-1.img").read_bytes() == PAGES
    assert (directory / FILES).read_bytes() == b"head" + name(
        TAKEN
    ) + b"/tmp/cuda-uvmfd-4026532350-1"


@pytest.mark.parametrize("files", [b"no sockets", name(HERE)])
def test_what_is_right_is_restored_as_it_is(tmp_path: Path, files: bytes) -> None:
    directory = image(tmp_path, files)
    assert view_for(directory, HERE, tmp_path) == directory
    assert list(tmp_path.iterdir()) == [directory]


def test_a_number_of_another_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="namespace 7"):
        view_for(image(tmp_path, name(TAKEN)), 7, tmp_path)
