from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.comm import tensor_digest
from dynamo_elastic.comm.tensor_digest import GOLDEN, ODD, digest, mix

MASK = (1 << 64) - 1


def plain(data: bytes) -> str:
    """The definition, word by word."""
    first = second = mix(len(data))
    padded = data + bytes(-len(data) % 8)
    for i in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * i : 8 * i + 8], "little")
        h = mix((word + (i + 1) * GOLDEN) & MASK)
        t = (h * ODD) & MASK
        first, second = first + h, second + (t ^ (t >> 32))
    return f"{first & MASK:016x}{second & MASK:016x}"


def of(data: bytes) -> str:
    return digest(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@given(data=st.binary(min_size=1, max_size=200))
def test_it_is_what_is_defined(data: bytes) -> None:
    assert of(data) == plain(data)


def test_it_stays_what_it_is() -> None:
    assert of(bytes(range(20))) == plain(bytes(range(20))) == KNOWN


KNOWN = "ea2b4495d4a1cd14bef912bd955c8248"


def test_nothing_has_a_digest_too() -> None:
    assert digest(torch.empty(0)) == plain(b"")


@given(data=st.binary(min_size=1, max_size=200), bit=st.integers(0, 1599))
def test_a_flipped_bit_shows(data: bytes, bit: int) -> None:
    flipped = bytearray(data)
    flipped[bit // 8 % len(data)] ^= 1 << bit % 8
    assert of(bytes(flipped)) != of(data)


@given(data=st.binary(min_size=2, max_size=200), first=st.integers(0), second=st.integers(0))
def test_swapped_places_show(data: bytes, first: int, second: int) -> None:
    swapped = bytearray(data)
    i, j = first % len(data), second % len(data)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert (of(bytes(swapped)) != of(data)) == (bytes(swapped) != data)


@given(words=st.lists(st.integers(0, MASK), min_size=2, max_size=30), by=st.integers(1, 29))
def test_words_in_another_order_show(words: list[int], by: int) -> None:
    turned = words[by % len(words) :] + words[: by % len(words)]
    ours, theirs = (b"".join(w.to_bytes(8, "little") for w in ws) for ws in (words, turned))
    assert (of(ours) != of(theirs)) == (words != turned)


@given(data=st.binary(min_size=1, max_size=100), cut=st.integers(1, 20))
def test_what_is_cut_off_or_added_shows_also_if_it_is_zero(data: bytes, cut: int) -> None:
    assert of(data + bytes(cut)) != of(data)
    assert of(bytes(cut) + data) != of(data)


@pytest.mark.parametrize("words", [2, 3, 257])
def test_the_same_flip_in_several_words_shows(words: int) -> None:
    data = torch.zeros(words, dtype=torch.int64)
    flipped = data.clone()
    flipped[:2] = -(1 << 63)
    assert digest(flipped) != digest(data)


def test_it_goes_through_large_tensors_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(1000, dtype=torch.int64)
    whole = digest(data)
    monkeypatch.setattr(tensor_digest, "_WORDS_AT_ONCE", 7)
    assert digest(data) == whole


def test_it_is_that_of_the_bytes_whatever_the_shape() -> None:
    data = torch.randn(6, 8).to(torch.bfloat16)
    assert digest(data) == digest(data.view(torch.int16).reshape(48))
    with pytest.raises(ValueError, match="contiguous"):
        digest(data.t())
