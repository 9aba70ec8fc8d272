"""Experts and weights of vLLM on their way to another rank: read in place by vLLM, staged by us.

    python benchmarks/vllm_elastic_moves.py                # 1 GPU, 2 if there are; about a minute

Two processes hold a layer of Qwen3-30B-A3B each, in the pool of vLLM's cumem allocator and in plain
memory. Expert by expert comes from the first to the second by vLLM's own rearrangement, once with
its NIXL communicator and once with ours; then 3 GB of other weights, as a joiner gets them. Every
byte is looked at. `--device cpu` tries the program, with ours alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from queue import Empty
from types import SimpleNamespace
from typing import Any

from provenance import write_result

from dynamo_elastic.engine.vllm.elastic.flags import elastic_environment

HOST, TIMEOUT_S = "127.0.0.1", 120.0
EXPERTS, HIDDEN, WIDTH = 128, 2048, 768
FEW = 8
"""Experts that vLLM's communicator moves out of the pool, where it may take long."""
TURNS = 3
DENSE = (400, 8 << 20)
"""Tensors that all ranks have alike, and bytes of each."""
READ, STAGED = "read_in_place", "staged"
POOL, PLAIN = "pool", "plain"


class Layer:
    """One layer of experts of one rank, where expert e is full of e + 1, and room to receive it."""

    def __init__(self, device: str, hidden: int, *, filled: bool) -> None:
        import torch

        shapes = (EXPERTS, 2 * WIDTH, hidden), (EXPERTS, hidden, WIDTH)
        self.weights = [torch.zeros(s, dtype=torch.bfloat16, device=device) for s in shapes]
        self.room = [torch.zeros_like(weight) for weight in self.weights]
        if filled:
            for weight in self.weights:
                weight += torch.arange(1, EXPERTS + 1, device=device)[:, None, None]

    @property
    def expert_bytes(self) -> int:
        return sum(weight[0].numel() * weight.element_size() for weight in self.weights)

    def wrong(self, experts: int) -> int:
        """Of the first `experts` that should have come, those that are not as they were."""
        import torch

        expected = torch.arange(1, experts + 1, device=self.room[0].device)[:, None, None]
        right = [(part[:experts] == expected).flatten(1).all(1) for part in self.room]
        return experts - int(torch.stack(right).all(0).sum())


class Mover:
    """One rank: both communicators over one layer, and one group."""

    def __init__(self, rank: int, port: int, device: str) -> None:
        import torch
        from vllm.distributed.eplb import eplb_communicator, eplb_state

        from dynamo_elastic.engine.vllm.elastic.groups import connect_gloo, open_store
        from dynamo_elastic.engine.vllm.v0_33 import expert_moves

        # They ask groups of vLLM, which are not there.
        eplb_communicator.is_local_first_rank = lambda: False
        nixl = eplb_communicator.NixlEplbCommunicator
        nixl._make_agent_name = lambda _: f"read-{rank}-{uuid.uuid4().hex[:8]}"
        self.rank, self._device = rank, device
        self.store = open_store(HOST, port, TIMEOUT_S)
        self._group = connect_gloo(self.store, "moves", rank, 2, TIMEOUT_S)
        self._stream = torch.Stream(torch.device(device)) if device != "cpu" else None
        self._create = {READ: eplb_state.create_eplb_communicator}
        expert_moves.install()
        self._create[STAGED] = eplb_state.create_eplb_communicator

    def move(self, layer: Layer, how: str, experts: int) -> list[dict[str, Any]]:
        """The first `experts` of the layer come to the last rank, TURNS times."""
        coordinator = SimpleNamespace(
            cpu_group=self._group, device_group=self._group, device_communicator=None
        )
        made = self._create[how](coordinator, "nixl", [layer.weights], layer.room)
        made.set_stream(self._stream)
        found = [self._turn(layer, made, experts) for _ in range(TURNS)]
        getattr(made, "close", lambda: None)()
        return found

    def _turn(self, layer: Layer, made: Any, experts: int) -> dict[str, Any]:
        import torch
        from vllm.distributed.eplb.rebalance_execute import transfer_layer

        for part in layer.room:
            part.zero_()
        self._meet()
        here, nothing = torch.arange(EXPERTS), torch.full((EXPERTS,), -1)
        there = torch.where(here < experts, here, nothing)
        began_s = time.monotonic()
        transfer_layer(
            old_layer_indices=torch.cat([here, nothing]),
            new_layer_indices=torch.cat([here, there]),
            expert_weights=layer.weights, expert_weights_buffer=layer.room,
            ep_group=self._group, communicator=made, stream=self._stream,
        )  # fmt: skip
        if self._stream is not None:
            self._stream.synchronize()
        took_s = time.monotonic() - began_s
        wrong = layer.wrong(experts) if self.rank else 0
        return {"s": took_s, "bytes": experts * layer.expert_bytes, "wrong": wrong}

    def dense(self) -> list[dict[str, Any]]:
        """Weights that all ranks have alike come to the last rank, as to one that joins."""
        import torch

        number, size_bytes = DENSE if self._device != "cpu" else (40, 1 << 16)
        value = 7 * (1 - self.rank)
        tensors = {
            f"{n:04}": torch.full((size_bytes,), value, dtype=torch.uint8, device=self._device)
            for n in range(number)
        }
        found = []
        for turn in range(TURNS):
            self._meet()
            began_s = time.monotonic()
            self._stream_once(tensors, turn)
            took_s = time.monotonic() - began_s
            wrong = sum(not bool((tensor == 7).all()) for tensor in tensors.values())
            found.append({"s": took_s, "bytes": number * size_bytes, "wrong": wrong})
            if self.rank:
                for tensor in tensors.values():
                    tensor.zero_()
        return found

    def _stream_once(self, tensors: dict[str, Any], turn: int) -> None:
        import torch

        from dynamo_elastic.engine.vllm.elastic.meeting import Meeting, Words
        from dynamo_elastic.engine.vllm.elastic.stream import Stream
        from dynamo_elastic.engine.vllm.v0_33.weights import new_agent

        words = Words(self.store, Meeting(self.store, timeout_s=TIMEOUT_S))
        agent = new_agent(f"dense-{self.rank}-{uuid.uuid4().hex[:8]}")
        device = torch.device(self._device)
        stream = Stream(words, f"dense/{turn}", agent, device, timeout_s=TIMEOUT_S)
        (stream.receive if self.rank else stream.send)(tensors)

    def _meet(self) -> None:
        import torch

        torch.distributed.barrier(group=self._group)


@contextmanager
def pool() -> Iterator[None]:
    """What is allocated is in the pool of vLLM's cumem allocator."""
    from vllm.device_allocator.cumem import CuMemAllocator

    with CuMemAllocator.get_instance().use_memory_pool(tag="weights"):
        yield


def be_rank(rank: int, port: int, device: str, said: Any) -> None:
    import torch

    if device != "cpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device = f"cuda:{torch.cuda.current_device()}"
    mover, found = Mover(rank, port, device), {}
    for where in (PLAIN, POOL) if device != "cpu" else (PLAIN,):
        with pool() if where == POOL else nullcontext():
            layer = Layer(device, HIDDEN if device != "cpu" else 16, filled=rank == 0)
        if device != "cpu":
            few = FEW if where == POOL else EXPERTS
            found[f"{READ}_{where}"] = mover.move(layer, READ, few)
        found[f"{STAGED}_{where}"] = mover.move(layer, STAGED, EXPERTS)
        del layer
    found["dense"] = mover.dense()
    if rank:
        said.put(found)


def _heard(said: Any, ranks: Sequence[Any]) -> dict[str, Any]:
    """Raises RuntimeError if a rank has ended without a word."""
    until_s = time.monotonic() + 3 * TIMEOUT_S
    while time.monotonic() < until_s:
        failed = [rank.exitcode for rank in ranks if rank.exitcode]
        with suppress(Empty):
            found: dict[str, Any] = said.get(timeout=1)
            return found
        if failed:
            break
    raise RuntimeError("a rank has failed, see above")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    os.environ.update(elastic_environment())
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    said: Any = spawn.Queue()
    ranks = [spawn.Process(target=be_rank, args=(r, store.port, device, said)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        found = _heard(said, ranks)
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
    metrics: dict[str, float] = {}
    for name, turns in found.items():
        best = min(turns, key=lambda turn: turn["s"])
        metrics |= {f"{name}_gbytes_per_s": best["bytes"] / best["s"] / 1e9,
                    f"{name}_s": best["s"], f"{name}_first_s": turns[0]["s"]}  # fmt: skip
    metrics["wrong"] = sum(turn["wrong"] for turns in found.values() for turn in turns)
    for name, value in metrics.items():
        print(f"{name:40} {value:10.4f}")
    if device != "cpu":
        print(write_result("vllm_elastic_moves", metrics, found))


if __name__ == "__main__":
    main()
