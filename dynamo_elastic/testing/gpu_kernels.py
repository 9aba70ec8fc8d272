"""Triton kernels of the GPU test engine. Imported only where there is a GPU."""

# No `from __future__ import annotations` here: Triton reads the annotations.
import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix(product, before, state, after, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = row * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(product + at).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / WIDTH + 1e-6)
    mixed = value * scale + 0.5 * tl.load(before + at).to(tl.float32)
    mixed += 0.125 * tl.load(state + at).to(tl.float32)
    tl.store(after + at, mixed.to(tl.bfloat16))


def mix(product: torch.Tensor, before: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Normalised rows of `product` plus parts of `before` and `state`; all three are contiguous
    bfloat16 of one shape (rows, a power of two)."""
    after = torch.empty_like(product)
    _mix[(product.shape[0],)](product, before, state, after, WIDTH=product.shape[1])
    return after
