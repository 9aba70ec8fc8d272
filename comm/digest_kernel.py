"""The sums of tensor_digest on a GPU: the one importer of Triton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from dynamo_elastic.comm import tensor_digest

_BLOCK_WORDS = 4096
_BLOCKS_A_PROGRAM = 16
_PROGRAM_WORDS = _BLOCK_WORDS * _BLOCKS_A_PROGRAM


@triton.jit  # type: ignore[untyped-decorator]
def _sum_words(  # type: ignore[no-untyped-def]
    parts,
    sums,
    golden: tl.constexpr,
    mix_1: tl.constexpr,
    mix_2: tl.constexpr,
    odd: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """Each program adds up `blocks` blocks of words of one tensor, and writes its two sums side by
    side. Its row of `parts`: the tensor's address, its own first word there, the tensor's words."""
    program = tl.program_id(0).to(tl.int64)
    words = tl.load(parts + 3 * program).to(tl.pointer_type(tl.int64))
    begin = tl.load(parts + 3 * program + 1)
    count = tl.load(parts + 3 * program + 2)
    first = tl.zeros([block], dtype=tl.uint64)
    second = tl.zeros([block], dtype=tl.uint64)
    for step in range(blocks):
        index = begin + step * block + tl.arange(0, block)
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
    """Both sums over the int64 words of each of `tensors`, on the current GPU, modulo 2**64.

    All in one launch, which it waits for: beside a thread that serves steps each launch waits for
    some milliseconds, and there are thousands of tensors.
    """
    programs = np.array([triton.cdiv(words.numel(), _PROGRAM_WORDS) for words in tensors])
    starts = np.cumsum(programs) - programs
    total = int(programs.sum())
    parts = np.empty((total, 3), dtype=np.int64)
    parts[:, 0] = np.repeat([words.data_ptr() for words in tensors], programs)
    parts[:, 1] = (np.arange(total) - np.repeat(starts, programs)) * _PROGRAM_WORDS
    parts[:, 2] = np.repeat([words.numel() for words in tensors], programs)
    device = tensors[0].device
    sums = torch.empty(total, 2, dtype=torch.int64, device=device)
    _sum_words[(total,)](
        torch.from_numpy(parts).to(device),
        sums,
        golden=tensor_digest.GOLDEN,
        mix_1=tensor_digest.MIX_1,
        mix_2=tensor_digest.MIX_2,
        odd=tensor_digest.ODD,
        block=_BLOCK_WORDS,
        blocks=_BLOCKS_A_PROGRAM,
        num_warps=8,
    )
    found = np.add.reduceat(sums.cpu().numpy().view(np.uint64), starts, axis=0)
    return [(int(first), int(second)) for first, second in found]
