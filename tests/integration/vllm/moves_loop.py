"""vLLM 0.33's own loop of expert moves, whose layers take their time, and our way to stop it, in
.venv-vllm-elastic: prints what happened as JSON. A group of one rank; a move is a sleep."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

LAYERS, LAYER_S = 40, 0.05


class Event:
    """In the place of a GPU's."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


torch.Event = Event  # type: ignore[misc, assignment]

from torch._C._distributed_c10d import TCPStore  # noqa: E402
from vllm.distributed.eplb import async_worker, eplb_state  # noqa: E402

from dynamo_elastic.engine.vllm.elastic.groups import connect_gloo  # noqa: E402
from dynamo_elastic.engine.vllm.v0_33 import moves  # noqa: E402


class Moves:
    """One rank's state of experts, and the thread that vLLM starts for it."""

    def __init__(self) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = connect_gloo(store, "experts", 0, 1, 5.0)
        async_worker.get_eplb_group = lambda: SimpleNamespace(device_group=group, cpu_group=group)
        async_worker.device_stream = lambda _: nullcontext()
        async_worker.run_rebalance_experts = lambda *_: torch.zeros(LAYERS, 2, dtype=torch.int64)
        async_worker.transfer_layer = lambda **_: time.sleep(LAYER_S)
        self.model_state: Any = SimpleNamespace(
            rebalanced=False, pending_result=None, expert_buffer=[],
            communicator=SimpleNamespace(set_stream=lambda _: None),
            physical_to_logical_map=torch.zeros(LAYERS, 2, dtype=torch.int64),
            model=SimpleNamespace(num_moe_layers=LAYERS, expert_weights=[[]] * LAYERS),
        )  # fmt: skip
        self.state: Any = SimpleNamespace(
            is_async=True, rearrange_event=eplb_state.CpuGpuEvent(),
            model_states={"m": self.model_state},
            parallel_config=SimpleNamespace(
                eplb_config=SimpleNamespace(migration_batching_enabled=False)
            ),
        )  # fmt: skip
        self.state.start_async_loop = self.start
        self.start()

    def start(self) -> None:
        stream = SimpleNamespace(synchronize=lambda: None)
        self.state.async_worker = threading.Thread(
            target=async_worker.transfer_run_periodically, args=(self.state, stream), daemon=True
        )
        self.state.async_worker.start()

    def fail(self) -> None:
        """The next layer is one that the thread ends with, as when a peer has died."""

        def broken(**_: Any) -> None:
            raise RuntimeError("a peer has died")

        async_worker.transfer_layer = broken
        until_s = time.monotonic() + 20
        while self.state.async_worker.is_alive() and time.monotonic() < until_s:
            if not self._take_one():
                time.sleep(0.001)

    def begin(self) -> None:
        self.model_state.rebalanced = True
        self.state.rearrange_event.record()

    def take(self, layers: int) -> int:
        """What vLLM's main thread does after a step, until that many layers were moved."""
        taken, until_s = 0, time.monotonic() + 20
        while taken < layers and time.monotonic() < until_s:
            if self._take_one():
                taken += 1
            else:
                time.sleep(0.001)
        return taken

    def _take_one(self) -> bool:
        result = self.model_state.pending_result
        if result is None:
            return False
        if result.layer_idx == LAYERS - 1:
            self.model_state.rebalanced = False
        self.model_state.pending_result = None
        result.consumed_event.record()
        return True


def main() -> None:
    moves.install()
    async_worker.CpuGpuEvent = eplb_state.CpuGpuEvent
    moved = Moves()
    found: dict[str, Any] = {"same_class": eplb_state.CpuGpuEvent is moves.TrackedEvent}
    for wanted in (0, 2):
        moved.begin()
        taken = moved.take(wanted)
        began_s = time.monotonic()
        eplb_state.EplbState.drain_async(moved.state)
        found[f"stopped_after_{wanted}"] = {
            "taken": taken, "s": time.monotonic() - began_s,
            "rests": moved.state.rearrange_event.rests,
            "rebalanced": moved.model_state.rebalanced,
        }  # fmt: skip
    moved.begin()
    found["then_all"] = moved.take(LAYERS)
    moved.begin()
    moved.take(2)
    moved.fail()
    began_s = time.monotonic()
    eplb_state.EplbState.drain_async(moved.state)
    found["stopped_after_an_error"] = {
        "s": time.monotonic() - began_s, "alive": moved.state.async_worker.is_alive(),
    }  # fmt: skip
    async_worker.transfer_layer = lambda **_: time.sleep(LAYER_S)
    moves.start_moves(moved.state)
    moved.begin()
    found["then_all_again"] = moved.take(LAYERS)
    policy = eplb_state.EPLB_POLICIES["default"]
    old = torch.tensor([[0, 1, 2, 3, -1, -1, -1, -1]] * 2)
    load = torch.tensor([[9.0, 1.0, 1.0, 1.0]] * 2)
    kept = policy.rebalance_experts(load, 8, 1, 1, 2, old)
    found["kept"] = kept[:, :4].tolist()
    found["copies"] = [row.count(0) for row in kept[:, 4:].tolist()]
    needed = policy.rebalance_experts(load, 4, 1, 1, 2, torch.tensor([[0, 1, 2, 3]] * 2))
    found["all_needed"] = [sorted(row) for row in needed.tolist()]
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
