"""Ranges of addresses: what of an allocation has to be kept. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

Range = tuple[int, int]
"""First address, and the one behind the last."""


def of_tensor(tensor: Tensor) -> Range:
    """All that a tensor can touch of its storage."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum(int((size - 1) * stride) for size, stride in steps)
    return start, start + (last + 1) * tensor.element_size()


def without(whole: Range, dropped: Iterable[Range]) -> Iterator[Range]:
    """What of `whole` is in none of `dropped`, in order.

    >>> list(without((0, 10), [(2, 4), (3, 5), (9, 20)]))
    [(0, 2), (5, 9)]
    """
    at, end = whole
    for start, stop in sorted(dropped):
        if stop <= at:
            continue
        if start >= end:
            break
        if start > at:
            yield at, start
        at = max(at, stop)
    if at < end:
        yield at, end
