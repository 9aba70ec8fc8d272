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

from collections.abc import Mapping

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
    """The digest of `data`'s bytes, as 32 hex digits; `data` is contiguous, on the host or a GPU.

    On a GPU it runs on the current stream and waits for it, and the first byte must be at a
    multiple of 8. Raises ValueError if it is not, or if `data` is not contiguous.
    """
    if not data.is_contiguous():
        raise ValueError("only a contiguous tensor has a digest: call contiguous() on it")
    flat = data.reshape(-1).view(torch.uint8)
    size_bytes = flat.numel()
    whole = size_bytes // WORD_BYTES * WORD_BYTES
    tail = flat[whole:].cpu().numpy().tobytes()
    first, second = _sums(flat[:whole])
    if tail:
        h = mix((int.from_bytes(tail, "little") + (whole // WORD_BYTES + 1) * GOLDEN) & _MASK)
        first, second = first + h, second + _fold(h)
    size_mark = mix(size_bytes)
    return f"{(first + size_mark) & _MASK:016x}{(second + size_mark) & _MASK:016x}"


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The digest of each tensor, by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def _sums(flat: torch.Tensor) -> tuple[int, int]:
    """Both sums over whole words, modulo 2**64 or not."""
    if not flat.numel():
        return 0, 0
    if flat.is_cuda:
        from dynamo_elastic.comm.digest_kernel import word_sums

        if flat.data_ptr() % WORD_BYTES:
            raise ValueError(f"a tensor at {flat.data_ptr():#x}: align it to {WORD_BYTES} bytes")
        with torch.cuda.device(flat.device):
            return word_sums(flat.view(torch.int64))
    return _sums_on_host(np.frombuffer(flat.numpy(), dtype="<u8"))


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
