"""A digest of tensors, the same on a GPU and on the host, at the speed of memory.

The bytes are taken as little-endian 64-bit words w[0], w[1], ..., the last one filled up with
zeros. With all arithmetic modulo 2**64, mix() the bijection below, and GOLDEN, ODD constants:

    h[i]   = mix(w[i] + (i + 1) * GOLDEN)
    t[i]   = h[i] * ODD;  u[i] = t[i] ^ (t[i] >> 32)
    digest = sum of h[i], sum of u[i], each + mix(size in bytes): 128 bits

The index goes into every word, so order counts; the sums can be taken in any order, so thousands of
threads can. A change of one word always shows, as h is a bijection of it; any other accident goes
unseen once in 2**64 or less. It is no defence against somebody who wants equal digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ODD = 0xD6E8FEB86659FD93
WORD_BYTES = 8
_MASK = (1 << 64) - 1
_WORDS_AT_ONCE = 1 << 20


def mix(word: int) -> int:
    """A bijection of 64-bit words in which every input bit reaches every output bit."""
    word = ((word ^ (word >> 30)) * MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * MIX_2) & _MASK
    return word ^ (word >> 31)


def digest(data: torch.Tensor) -> str:
    """The digest of `data`'s bytes, as 32 hex digits; see digest_all()."""
    return digest_all([data])[0]


def digest_all(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The digest of each tensor; all are contiguous, and on the host or on one GPU.

    On a GPU it runs on the current stream and waits for it once, and the first byte of each must be
    at a multiple of 8. Raises ValueError if it is not, or if one is not contiguous.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("only a contiguous tensor has a digest: call contiguous() on it")
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    whole = [data[: data.numel() // WORD_BYTES * WORD_BYTES] for data in flat]
    sums = _sums(whole)
    return [_finish(*pair) for pair in zip(flat, whole, sums, strict=True)]


def _finish(flat: torch.Tensor, whole: torch.Tensor, sums: tuple[int, int]) -> str:
    """`sums` are those over `whole`, the whole words of `flat`."""
    first, second = sums
    if len(whole) < len(flat):
        tail = int.from_bytes(flat[len(whole) :].cpu().numpy().tobytes(), "little")
        h = mix((tail + (len(whole) // WORD_BYTES + 1) * GOLDEN) & _MASK)
        first, second = first + h, second + _fold(h)
    size_mark = mix(len(flat))
    return f"{(first + size_mark) & _MASK:016x}{(second + size_mark) & _MASK:016x}"


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The digest of each tensor, by name."""
    return dict(zip(tensors, digest_all(list(tensors.values())), strict=True))


def _sums(pieces: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Both sums over the words of each piece, modulo 2**64 or not."""
    filled = [piece for piece in pieces if piece.numel()]
    if any(piece.is_cuda for piece in filled):
        sums = iter(_sums_on_gpu(filled))
    else:
        sums = (_sums_on_host(np.frombuffer(piece.numpy(), dtype="<u8")) for piece in filled)
    return [next(sums) if piece.numel() else (0, 0) for piece in pieces]


def _sums_on_gpu(pieces: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    from dynamo_elastic.comm.digest_kernel import word_sums

    for piece in pieces:
        if piece.data_ptr() % WORD_BYTES:
            raise ValueError(f"a tensor at {piece.data_ptr():#x}: align it to {WORD_BYTES} bytes")
    with torch.cuda.device(pieces[0].device):
        return word_sums([piece.view(torch.int64) for piece in pieces])


def _sums_on_host(words: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> tuple[int, int]:
    first = second = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        index = np.arange(start + 1, start + 1 + len(part), dtype=np.uint64)
        h = part + index * np.uint64(GOLDEN)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(MIX_1)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(MIX_2)
        h ^= h >> np.uint64(31)
        t = h * np.uint64(ODD)
        first += int(h.sum(dtype=np.uint64))
        second += int((t ^ (t >> np.uint64(32))).sum(dtype=np.uint64))
    return first, second


def _fold(h: int) -> int:
    t = (h * ODD) & _MASK
    return t ^ (t >> 32)
