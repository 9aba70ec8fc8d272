"""The sums of tensor_digest on a GPU: the one importer of Triton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from dynamo_elastic.comm import tensor_digest

_BLOCK_WORDS = 4096
_BLOCKS_A_PART = 16
_PART_WORDS = _BLOCK_WORDS * _BLOCKS_A_PART
_PROGRAMS = 32
"""At once, of a GPU's hundred and more multiprocessors: steps that are served go on on the others.
"""


# One compilation for every number of parts.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sum_words(  # type: ignore[no-untyped-def]
    parts,
    sums,
    count,
    golden: tl.constexpr,
    mix_1: tl.constexpr,
    mix_2: tl.constexpr,
    odd: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """Adds up each part, `blocks` blocks of words of one tensor, and writes its two sums side by
    side. A row of `parts`: the tensor's address, the part's first word there, the tensor's words.
    """
    for part in range(tl.program_id(0), count, tl.num_programs(0)):
        words = tl.load(parts + 3 * part).to(tl.pointer_type(tl.int64))
        begin = tl.load(parts + 3 * part + 1)
        end = tl.load(parts + 3 * part + 2)
        first = tl.zeros([block], dtype=tl.uint64)
        second = tl.zeros([block], dtype=tl.uint64)
        for step in range(blocks):
            index = begin + step * block + tl.arange(0, block)
            inside = index < end
            word = tl.load(words + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
            h = word + (index + 1).to(tl.uint64) * golden
            h = (h ^ (h >> 30)) * mix_1
            h = (h ^ (h >> 27)) * mix_2
            h = h ^ (h >> 31)
            t = h * odd
            zero = tl.zeros([block], dtype=tl.uint64)
            first += tl.where(inside, h, zero)
            second += tl.where(inside, t ^ (t >> 32), zero)
        tl.store(sums + 2 * part, tl.sum(first.to(tl.int64, bitcast=True), axis=0))
        tl.store(sums + 2 * part + 1, tl.sum(second.to(tl.int64, bitcast=True), axis=0))


def word_sums(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Both sums over the int64 words of each of `tensors`, on the current GPU, modulo 2**64.

    All in one launch, which it waits for: beside a thread that serves steps each launch waits for
    some milliseconds, and there are thousands of tensors.
    """
    counts = np.array([triton.cdiv(words.numel(), _PART_WORDS) for words in tensors])
    starts = np.cumsum(counts) - counts
    total = int(counts.sum())
    parts = np.empty((total, 3), dtype=np.int64)
    parts[:, 0] = np.repeat([words.data_ptr() for words in tensors], counts)
    parts[:, 1] = (np.arange(total) - np.repeat(starts, counts)) * _PART_WORDS
    parts[:, 2] = np.repeat([words.numel() for words in tensors], counts)
    device = tensors[0].device
    sums = torch.empty(total, 2, dtype=torch.int64, device=device)
    _sum_words[(min(total, _PROGRAMS),)](
        torch.from_numpy(parts).to(device),
        sums,
        total,
        golden=tensor_digest.GOLDEN,
        mix_1=tensor_digest.MIX_1,
        mix_2=tensor_digest.MIX_2,
        odd=tensor_digest.ODD,
        block=_BLOCK_WORDS,
        blocks=_BLOCKS_A_PART,
        num_warps=8,
    )
    found = np.add.reduceat(sums.cpu().numpy().view(np.uint64), starts, axis=0)
    return [(int(first), int(second)) for first, second in found]
