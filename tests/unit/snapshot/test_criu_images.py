"""CRIU's index of pages, as it writes it."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_elastic.errors import SnapshotError
from dynamo_elastic.snapshot.criu_images import PageRange, own_pages, own_pids, pages_file

PARENT, LAZY, PRESENT = 1, 2, 4
PAGE = 4096


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def entry(fields: dict[int, int]) -> bytes:
    body = b"".join(varint(field << 3) + varint(value) for field, value in fields.items())
    return struct.pack("<I", len(body)) + body


def write(directory: Path, *entries: dict[int, int]) -> Path:
    head = struct.pack("<II", 0x54564319, 0x56084025) + entry({1: 3})
    path = directory / "pagemap-1000.img"
    path.write_bytes(head + b"".join(entry(fields) for fields in entries))
    return path


PAGES = st.tuples(st.integers(1, 1 << 35), st.integers(1, 1 << 20), st.booleans())


@settings(deadline=None)  # each example writes files
@given(st.lists(PAGES, max_size=20))
def test_what_is_ours_and_where_it_is(pages: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        write(
            Path(name),
            *(
                {1: at * PAGE, 2: count, 4: PRESENT | (LAZY if lazy else 0), 5: count}
                for at, count, lazy in pages
            ),
        )
        found = own_pages(Path(name), 1000)
    offset = 0
    expected = []
    for at, count, lazy in pages:
        if lazy:
            expected.append(PageRange(at * PAGE, count * PAGE, offset))
        offset += count * PAGE
    assert found == expected


def test_more_pages_than_the_older_field_holds(tmp_path: Path) -> None:
    write(tmp_path, {1: PAGE, 2: 7, 4: LAZY | PRESENT, 5: 1 << 33}, {1: PAGE, 2: 7, 4: 6})
    many, few = own_pages(tmp_path, 1000)
    assert many.size_bytes == PAGE << 33
    assert (few.size_bytes, few.offset) == (7 * PAGE, PAGE << 33)


@pytest.mark.parametrize("flags", [PARENT, LAZY, PARENT | PRESENT])
def test_pages_that_are_elsewhere_are_refused(tmp_path: Path, flags: int) -> None:
    write(tmp_path, {1: PAGE, 2: 1, 4: flags})
    with pytest.raises(SnapshotError, match="not an image file"):
        own_pages(tmp_path, 1000)


@settings(deadline=None)  # each example writes files
@given(st.integers(0, 60))
def test_index_that_is_cut_is_refused_or_shorter(size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name), *({1: n * PAGE, 2: 1, 4: 6} for n in range(1, 5)))
        whole = own_pages(Path(name), 1000)
        path.write_bytes(path.read_bytes()[:size])
        try:
            found = own_pages(Path(name), 1000)
        except SnapshotError:
            return
        assert found == whole[: len(found)]


def test_files_of_a_process(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "pagemap-shmem-5.img").touch()
    assert own_pids(tmp_path) == {1000}
    assert pages_file(tmp_path, 1000) == tmp_path / "pages-3.img"
