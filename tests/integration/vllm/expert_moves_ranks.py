"""vLLM 0.33's own rearrangement of experts over our exchange, in .venv-vllm-elastic: prints whether
each rank has in the end what it should, as JSON. Host memory in the place of a GPU's."""

from __future__ import annotations

import json
import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from vllm.distributed.eplb import eplb_communicator, eplb_state, rebalance_execute

from dynamo_elastic.engine.vllm.elastic.groups import connect_gloo, open_store
from dynamo_elastic.engine.vllm.v0_33 import expert_moves

eplb_communicator.is_local_first_rank = lambda: False  # asks vLLM's groups

RANKS, SLOTS, LAYERS, SEED = 3, 4, 3, 1
HOST, TIMEOUT_S = "127.0.0.1", 20.0


def maps() -> tuple[torch.Tensor, torch.Tensor]:
    """Where experts are, and where they are to be: (layers, slots of all ranks). The last rank has
    none at first, as one that has just joined; then some have copies."""
    chance = torch.Generator().manual_seed(SEED)
    free = torch.full((SLOTS,), -1)
    held = torch.stack([torch.randperm(8, generator=chance) for _ in range(LAYERS)])
    old = torch.cat([held, free.expand(LAYERS, -1)], dim=1)
    spread = [torch.cat([torch.arange(8), torch.randint(8, (4,), generator=chance)])
              for _ in range(LAYERS)]  # fmt: skip
    new = torch.stack([one[torch.randperm(12, generator=chance)] for one in spread])
    return old, new


def weights(numbers: torch.Tensor, layer: int) -> list[torch.Tensor]:
    """Of the experts `numbers` in one layer, each (slots, ...): values that name both."""
    named = (100 * layer + numbers).float()
    return [named[:, None, None].expand(-1, 6, 5).to(torch.bfloat16).contiguous(),
            named[:, None].expand(-1, 3).contiguous()]  # fmt: skip


def serve(rank: int, port: int, said: Any) -> None:
    store = open_store(HOST, port, TIMEOUT_S)
    group = connect_gloo(store, "experts", rank, RANKS, TIMEOUT_S)
    old, new = maps()
    mine = slice(rank * SLOTS, (rank + 1) * SLOTS)
    layers = [weights(old[layer, mine], layer) for layer in range(LAYERS)]
    buffer = [torch.empty_like(tensor) for tensor in layers[0]]
    expert_moves.install()
    made = eplb_state.create_eplb_communicator(
        SimpleNamespace(cpu_group=group), "nixl", layers, buffer
    )
    for layer in range(LAYERS):
        moved = rebalance_execute.transfer_layer(
            old_layer_indices=old[layer], new_layer_indices=new[layer],
            expert_weights=layers[layer], expert_weights_buffer=buffer,
            ep_group=group, communicator=made, layer_idx=layer,
        )  # fmt: skip
        rebalance_execute.move_from_buffer(layers[layer], buffer, moved, new[layer].numpy(), rank)
    wanted = [weights(new[layer, mine], layer) for layer in range(LAYERS)]
    right = [
        torch.equal(a, b)
        for found, expected in zip(layers, wanted, strict=True)
        for a, b in zip(found, expected, strict=True)
    ]
    kind = type(made).__name__
    before = len(os.listdir("/proc/self/task"))
    made.close()
    made.close()
    left = len(os.listdir("/proc/self/task")) - before
    said.put({"rank": rank, "made": kind, "right": right, "threads": left})


def main() -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    said: Any = fork.Queue()
    ranks = [fork.Process(target=serve, args=(rank, store.port, said)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = [said.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(20)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
