"""A rank of an elastic group and its place in Dynamo: who is seen when, whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_elastic.dynamo.vllm_rank import ATTACH, FAIL, SCALE, ElasticRank
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.errors import ConfigError, EngineError


class World:
    """Engine, coordinator and seat of one rank, and what happened, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fails: Exception | None = None
        self.paused = [True, True, False]
        self.log_stats = True
        self.requests = Requests()
        self.engine_core = SimpleNamespace(
            external_eep_coordinator=self, call_utility_async=self.call
        )
        self.poll_s = 0.0

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 0) -> None:
        self.said.append(f"scale {new_data_parallel_size}, statistics {self.log_stats}")
        if self.fails is not None:
            raise self.fails

    async def attach(self) -> dict[str, float]:
        self.said.append("attach")
        if self.fails is not None:
            raise self.fails
        return {"weights": 0.5}

    async def call(self, name: str) -> bool:
        assert name == "is_scheduler_paused"
        return self.paused.pop(0) if len(self.paused) > 1 else self.paused[0]

    def tell_failure(self, reason: str) -> None:
        self.said.append(f"failed: {reason}")

    async def take(self, runtime_data: Mapping[str, str]) -> int:
        self.said.append(f"seen as {dict(runtime_data)}")
        return 7

    async def leave(self) -> None:
        self.said.append("unseen")


def rank_of(world: World, rank: int) -> ElasticRank:
    made = ElasticRank(rank, world, world, world.requests)
    assert asyncio.run(made.register({"rank": str(rank)})) == 7
    world.said.clear()
    return made


def test_who_leaves_is_unseen_before_and_who_stays_keeps_its_statistics() -> None:
    world = World()
    asyncio.run(rank_of(world, 1).scale(1, drain_timeout_s=1))
    assert world.said == ["unseen", "scale 1, statistics False"]
    assert world.log_stats
    world = World()
    asyncio.run(rank_of(world, 0).scale(2, drain_timeout_s=1))
    assert world.said == ["scale 2, statistics False"]
    assert world.log_stats


def test_rank_0_never_leaves() -> None:
    world = World()
    with pytest.raises(ConfigError, match="rank 0"):
        asyncio.run(rank_of(world, 0).scale(0, drain_timeout_s=1))
    assert world.said == []


def test_an_operation_that_was_undone_leaves_everybody_seen() -> None:
    world = World()
    world.fails = Exception("Call to commit_prepared_elastic_ep method failed")
    with pytest.raises(EngineError, match="did not scale to 1"):
        asyncio.run(rank_of(world, 1).scale(1, drain_timeout_s=1))
    assert world.said[-1] == "seen as {'rank': '1'}"
    assert world.log_stats


def test_who_comes_back_is_seen_once_it_serves() -> None:
    world = World()
    assert asyncio.run(rank_of(world, 1).attach(timeout_s=5)) == {"weights": 0.5}
    assert world.said == ["attach", "seen as {'rank': '1'}"]
    assert world.paused == [False]


@pytest.mark.parametrize("fault", ["never serves", "refused"])
def test_who_does_not_come_to_serve_is_not_seen(fault: str) -> None:
    world = World()
    if fault == "refused":
        world.fails = RuntimeError("not ready")
    else:
        world.paused = [True]
    with pytest.raises(EngineError, match="did not"):
        asyncio.run(rank_of(world, 1).attach(timeout_s=0.05))
    assert world.said == ["attach"]


def test_requests_of_a_leaver_end_or_move() -> None:
    async def leave() -> list[str]:
        world = World()
        rank = ElasticRank(1, world, world, world.requests)
        await rank.register({})

        async def endless() -> Any:
            while True:
                yield {"token_ids": [1]}
                await asyncio.sleep(0.001)

        async def client() -> str:
            try:
                async for _ in world.requests.run(endless()):
                    pass
            except Exception as exc:  # noqa: BLE001 - its name is the answer
                return type(exc).__name__
            return "ended"

        task = asyncio.create_task(client())
        await asyncio.sleep(0.01)
        await rank.scale(1, drain_timeout_s=0.02)
        return [await task, *world.said[1:]]

    assert asyncio.run(leave()) == ["RequestMoved", "unseen", "scale 1, statistics False"]


def test_its_socket_answers_three_calls() -> None:
    world = World()
    calls = rank_of(world, 0).calls()
    assert set(calls) == {SCALE, ATTACH, FAIL}

    async def call() -> Any:
        await calls[FAIL]({"reason": "a joiner ended"})
        await calls[SCALE]({"width": 2, "drain_timeout_s": 1})
        return await calls[ATTACH]({"timeout_s": 5})

    assert asyncio.run(call()) == {"weights": 0.5}
    assert world.said[:2] == ["failed: a joiner ended", "scale 2, statistics False"]
