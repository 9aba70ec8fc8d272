"""Tensors from one rank to another over a gloo group, by way of the host: no communicator of the
GPU has to be made first, and no address of either side outlives the call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamo_elastic.errors import TransferError

_CHUNK_BYTES = 64 << 20
_TAG = 0x0DE1


def send_tensors(tensors: Mapping[str, Tensor], group: ProcessGroup, to: int) -> int:
    """All of them, whatever their layout; the number of bytes. Raises TransferError."""
    sent = 0
    try:
        _compare_sizes(tensors, group, to, speaks_first=True)
        for chunk in _chunks(tensors):
            host = chunk.cpu()
            _exchange(host, group, to, send=True)
            sent += host.numel()
    except RuntimeError as exc:
        raise TransferError(f"sending weights failed: {exc}", remote=str(to)) from exc
    return sent


def receive_tensors(tensors: Mapping[str, Tensor], group: ProcessGroup, source: int) -> int:
    """Fill `tensors`, which are named and shaped as the sender's. Raises TransferError; then they
    hold an unknown mix."""
    received = 0
    try:
        _compare_sizes(tensors, group, source, speaks_first=False)
        for name in sorted(tensors):
            received += _receive_one(tensors[name], group, source)
    except RuntimeError as exc:
        raise TransferError(f"receiving weights failed: {exc}", remote=str(source)) from exc
    return received


def _compare_sizes(
    tensors: Mapping[str, Tensor], group: ProcessGroup, peer: int, *, speaks_first: bool
) -> None:
    """Both sides find out, before a byte of weights is on its way. Raises TransferError."""
    own, theirs = torch.tensor([total_bytes(tensors)]), torch.zeros(1, dtype=torch.int64)
    for send in (speaks_first, not speaks_first):
        _exchange(own if send else theirs, group, peer, send=send)
    if int(theirs) != int(own):
        raise TransferError(
            f"weights differ: {int(theirs)} bytes there, {int(own)} here", remote=str(peer)
        )


def total_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _receive_one(tensor: Tensor, group: ProcessGroup, source: int) -> int:
    whole = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    for start in range(0, len(whole), _CHUNK_BYTES):
        _exchange(whole[start : start + _CHUNK_BYTES], group, source, send=False)
    with torch.no_grad():
        tensor.copy_(whole.view(tensor.dtype).view(tensor.shape))
    return len(whole)


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    for name in sorted(tensors):
        data = tensors[name].detach().contiguous().flatten().view(torch.uint8)
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def _exchange(tensor: Tensor, group: ProcessGroup, peer: int, *, send: bool) -> None:
    work = group.send([tensor], peer, _TAG) if send else group.recv([tensor], peer, _TAG)
    work.wait()
