"""What the GPU test engine computes: CUDA graphs of several batch sizes over an arena."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import xxhash

from dynamo_elastic.memory.arena import layout
from dynamo_elastic.memory.base import VmmDriver
from dynamo_elastic.memory.cuda_vmm import CudaVmm
from dynamo_elastic.memory.vmm import VmmArena
from dynamo_elastic.testing.gpu_memory import FakeVmm

WIDTH = 4096
_LAYER_BYTES = WIDTH * WIDTH * 2
_BATCH_STEP = 8
_SPREAD = 0.02
_HOST_ARENA_BYTES = 1 << 36

Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Replay = Callable[[], None]


class GpuWork:
    """`graphs` CUDA graphs, number g (from 0) with a batch of 8 (g + 1) rows, on device 0.

    Each layer is one cuBLAS matrix product and one Triton kernel; graph g runs layers g, g +
    `graphs`, ..., so that all graphs together read every weight once. `weights_bytes` of weights
    are in a VMM arena that discard() empties; `state_bytes` of made-up state, inputs and outputs
    stay on the device. Raises ResourceMissing, DeviceMemoryFull.

    With `device` "cpu" the same runs without graphs, over an arena in host memory: for trying out
    all that is around it.
    """

    def __init__(
        self, *, weights_bytes: int, state_bytes: int, graphs: int, seed: int, device: str = "cuda"
    ) -> None:
        self._device = torch.device(device)
        mix, driver = _parts(self._device)
        layers = max(graphs, -(-weights_bytes // _LAYER_BYTES))
        regions = layout((f"layer{number}", _LAYER_BYTES) for number in range(layers))
        self._arena = VmmArena(regions, driver)
        self._weights = [
            self._arena.tensor(region, torch.bfloat16, (WIDTH, WIDTH)) for region in regions
        ]
        self._batches = [_BATCH_STEP * (g + 1) for g in range(graphs)]
        rows = sum(self._batches)
        self._generator = torch.Generator(device=self._device)
        self._inputs = self._random(rows, seed)
        self._outputs = torch.empty_like(self._inputs)
        self._state = self._random(max(rows, state_bytes // (2 * WIDTH)), seed + 1)
        self.fill(seed)
        forwards: list[Replay] = [partial(self._forward, g, mix) for g in range(graphs)]
        self._replays = _captured(forwards) if self._device.type == "cuda" else forwards

    @property
    def weights_bytes(self) -> int:
        return self._arena.size_bytes

    @property
    def graphs(self) -> int:
        return len(self._replays)

    def populate(self) -> None:
        """There is memory for the weights."""
        self._arena.populate()

    def fill(self, seed: int) -> None:
        """Every weight is what `seed` says."""
        for layer, weight in enumerate(self._weights):
            self._generator.manual_seed((seed << 20) + layer)
            weight.uniform_(-_SPREAD, _SPREAD, generator=self._generator)

    def synchronize(self) -> None:
        """All that was begun on the device has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def discard(self) -> None:
        """No weight is on the device any more, nor memory that torch holds in reserve."""
        self._arena.discard()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def probe(self) -> str:
        """Digest of what all graphs make of inputs, weights and state, each replayed once."""
        self._outputs.zero_()
        for replay in self._replays:
            replay()
        digest = xxhash.xxh3_128(self._outputs.view(torch.uint8).cpu().numpy().data)
        digest.update(int(self._state.view(torch.int64).sum()).to_bytes(8, "little", signed=True))
        return digest.hexdigest()

    def state_bytes(self) -> int:
        """What stays on the device after discard(), as torch counts it."""
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved()
        return self._state.nbytes + self._inputs.nbytes + self._outputs.nbytes

    def _random(self, rows: int, seed: int) -> torch.Tensor:
        values = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=self._device)
        return values.normal_(generator=self._generator.manual_seed(seed))

    def _forward(self, number: int, mix: Mix) -> None:
        first = sum(self._batches[:number])
        span = slice(first, first + self._batches[number])
        hidden = self._inputs[span]
        for weight in itertools.islice(self._weights, number, None, len(self._batches)):
            hidden = mix(hidden @ weight, hidden, self._state[span])
        self._outputs[span].copy_(hidden)


def _parts(device: torch.device) -> tuple[Mix, VmmDriver]:
    if device.type == "cpu":
        return _mix_on_host, FakeVmm(total_bytes=_HOST_ARENA_BYTES)
    from dynamo_elastic.testing.gpu_kernels import mix

    return mix, CudaVmm()


def _mix_on_host(product: torch.Tensor, before: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """What gpu_kernels.mix() computes."""
    value = product.float()
    scale = (value.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()
    return (value * scale + 0.5 * before.float() + 0.125 * state.float()).to(torch.bfloat16)


def _captured(forwards: Sequence[Replay]) -> list[Replay]:
    """CUDA graphs of them. They take their scratch memory from one pool: no two run at once."""
    pool = torch.cuda.graph_pool_handle()
    replays: list[Replay] = []
    for forward in forwards:
        forward()  # compiles, and chooses algorithms, which a capture can't
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            forward()
        replays.append(graph.replay)
    return replays
