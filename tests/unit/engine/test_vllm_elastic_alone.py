"""A group of one rank keeps what vLLM gives larger ones only."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from dynamo_elastic.engine.vllm.v0_33.alone import keep_expert_maps, with_experts_of_its_own


@dataclass
class Parallel:
    dp_size: int
    ep_size: int
    ep_rank: int
    dp_rank: int
    use_ep: bool


@dataclass
class Moe:
    num_experts: int
    moe_parallel_config: Parallel


def test_one_rank_dispatches_to_itself() -> None:
    before = Moe(8, Parallel(dp_size=2, ep_size=2, ep_rank=0, dp_rank=0, use_ep=True))
    made = Moe(4, Parallel(dp_size=1, ep_size=1, ep_rank=0, dp_rank=0, use_ep=False))
    kept = with_experts_of_its_own(made, before)
    assert kept == Moe(4, Parallel(dp_size=2, ep_size=1, ep_rank=0, dp_rank=0, use_ep=True))


class Manager:
    """vLLM's ExpertMapManager, which has no map for one rank."""

    global_num_experts = 4
    _expert_map: torch.Tensor | None = None

    @property
    def expert_map(self) -> torch.Tensor | None:
        return self._expert_map


def test_one_rank_has_a_map_of_all_slots_and_others_keep_theirs() -> None:
    updated: list[str] = []
    alone, other = Manager(), Manager()
    theirs = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    other._expert_map = theirs
    layers = [
        SimpleNamespace(
            routed_experts=SimpleNamespace(
                expert_map_manager=manager,
                update_expert_map_info=lambda name=name: updated.append(name),
            )
        )
        for name, manager in (("alone", alone), ("other", other))
    ]
    keep_expert_maps(layers, torch.device("cpu"))
    assert alone.expert_map is not None
    assert alone.expert_map.tolist() == [0, 1, 2, 3]
    assert alone.expert_map.dtype == torch.int32
    assert other.expert_map is theirs
    assert updated == ["alone"]
