"""The GPU's copy engine behind the CopyEngine seam: the one importer of the driver's copy calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from cuda.bindings import driver

from dynamo_elastic.comm.base import Span
from dynamo_elastic.comm.peer_push import MappedArena
from dynamo_elastic.errors import DeviceMemoryError
from dynamo_elastic.types import SharedChunk


class CudaCopyEngine:
    """A CopyEngine (see comm.peer_push) that copies on a stream of its own of the current device,
    beside the steps that are served. `mapper` maps a peer's chunks for this device.

    One stream is as fast as four: a copy keeps the engine busy by itself.
    """

    def __init__(self, mapper: Callable[[Sequence[SharedChunk]], MappedArena]) -> None:
        self._mapper = mapper
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def map(self, chunks: Sequence[SharedChunk]) -> MappedArena:
        return self._mapper(chunks)

    def copy(self, pairs: Sequence[tuple[Span, Span]]) -> Callable[[], bool]:
        """As in CopyEngine. It does not wait for work of other streams on the memory copied from:
        weights that are sent must have been written before."""
        with torch.cuda.device(self._device):
            for source, target in pairs:
                self._start(source, target)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return lambda: _query(done)

    def _start(self, source: Span, target: Span) -> None:
        (result,) = driver.cuMemcpyDtoDAsync(
            target.address, source.address, source.size_bytes, self._stream.cuda_stream
        )
        if result != driver.CUresult.CUDA_SUCCESS:
            raise DeviceMemoryError("cuMemcpyDtoDAsync", result.name)


def _query(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except RuntimeError as exc:
        raise DeviceMemoryError("cuEventQuery", "", str(exc)) from exc
