"""The sums of tensor_digest on a GPU: the one importer of Triton."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl

from dynamo_elastic.comm import tensor_digest

_BLOCK_WORDS = 4096
_BLOCKS_A_PROGRAM = 16
_PROGRAM_WORDS = _BLOCK_WORDS * _BLOCKS_A_PROGRAM


# One compilation for every length: `count` is neither specialised nor of a width of its own.
@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sum_words(  # type: ignore[no-untyped-def]
    words,
    sums,
    count: tl.int64,
    golden: tl.constexpr,
    mix_1: tl.constexpr,
    mix_2: tl.constexpr,
    odd: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """Each program adds up `blocks` blocks of words, and writes its two sums side by side."""
    program = tl.program_id(0).to(tl.int64)
    first = tl.zeros([block], dtype=tl.uint64)
    second = tl.zeros([block], dtype=tl.uint64)
    for step in range(blocks):
        index = (program * blocks + step) * block + tl.arange(0, block)
        inside = index < count
        word = tl.load(words + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
        h = word + (index + 1).to(tl.uint64) * golden
        h = (h ^ (h >> 30)) * mix_1
        h = (h ^ (h >> 27)) * mix_2
        h = h ^ (h >> 31)
        t = h * odd
        zero = tl.zeros([block], dtype=tl.uint64)
        first += tl.where(inside, h, zero)
        second += tl.where(inside, t ^ (t >> 32), zero)
    tl.store(sums + 2 * program, tl.sum(first.to(tl.int64, bitcast=True), axis=0))
    tl.store(sums + 2 * program + 1, tl.sum(second.to(tl.int64, bitcast=True), axis=0))


def word_sums(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Both sums over the int64 words of each of `tensors`, on the current GPU, modulo 2**64. Waits
    for them once, however many there are."""
    programs = [triton.cdiv(words.numel(), _PROGRAM_WORDS) for words in tensors]
    starts = [0, *accumulate(programs)]
    sums = torch.empty(starts[-1], 2, dtype=torch.int64, device=tensors[0].device)
    for words, start, count in zip(tensors, starts, programs, strict=False):
        _sum_words[(count,)](
            words,
            sums[start:],
            words.numel(),
            golden=tensor_digest.GOLDEN,
            mix_1=tensor_digest.MIX_1,
            mix_2=tensor_digest.MIX_2,
            odd=tensor_digest.ODD,
            block=_BLOCK_WORDS,
            blocks=_BLOCKS_A_PROGRAM,
            num_warps=8,
        )
    parts = sums.cpu().numpy().view(np.uint64)
    totals = np.add.reduceat(parts, starts[:-1], axis=0)
    return [(int(first), int(second)) for first, second in totals]
