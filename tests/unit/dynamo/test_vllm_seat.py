"""A replica's place in Dynamo: the gate, taking, leaving, coming back; over made-up functions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from dynamo_elastic.dynamo import vllm_seat
from dynamo_elastic.dynamo.base import RUNTIME_DATA_KEY
from dynamo_elastic.dynamo.vllm_seat import ReplicaSeat, SeatState
from dynamo_elastic.errors import IllegalTransition, RegistrationFailed

INSTANCE = 77


class Card:
    """Dynamo's runtime configuration of a model."""

    def __init__(self) -> None:
        self.data: dict[str, str] = {}

    def set_engine_specific(self, key: str, value: str) -> None:
        self.data[key] = json.loads(value)


class Discovery:
    """What clients see, and the functions that change it."""

    def __init__(self) -> None:
        self.instances: set[int] = set()
        self.cards: dict[int, str] = {}
        self.calls: list[str] = []
        self.broken = ""

    def connection_id(self) -> int:
        return INSTANCE

    async def client(self) -> Discovery:
        return self

    def instance_ids(self) -> list[int]:
        return list(self.instances)

    async def wait_for_instances_by_runtime_data(
        self, key: str, value: str, count: int, timeout_s: float
    ) -> list[int]:
        return [i for i, tag in self.cards.items() if tag == value]

    async def register_endpoint_instance(self) -> None:
        self._call("register_endpoint")
        self.instances.add(INSTANCE)

    async def unregister_endpoint_instance(self) -> None:
        self._call("unregister_endpoint")
        self.instances.discard(INSTANCE)

    async def register_model(self, *arguments: Any, runtime_config: Card) -> None:
        self._call("register_model")
        self.cards[INSTANCE] = runtime_config.data[RUNTIME_DATA_KEY]

    async def unregister_model(self, endpoint: Any) -> None:
        self._call("unregister_model")
        self.cards.pop(INSTANCE, None)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise RuntimeError("Dynamo says no")


class Worker:
    """Dynamo's worker: registers its model, then serves its endpoint."""

    def __init__(self) -> None:
        self.discovery = Discovery()
        self.seat = ReplicaSeat(self.discovery.register_model, self.discovery.unregister_model)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.seat.register_model("tokens", "chat", self.discovery, runtime_config=Card())
        await self.discovery.register_endpoint_instance()


def test_nobody_sees_the_replica_before_its_shell_says_so() -> None:
    async def body() -> None:
        worker = Worker()
        await asyncio.sleep(0)
        assert worker.seat.state == "waiting"
        assert not worker.discovery.calls
        assert await worker.seat.take({"rank": "0", "epoch": "1"}) == INSTANCE
        assert worker.seat.state == "taken"
        assert json.loads(worker.discovery.cards[INSTANCE]) == {"epoch": "1", "rank": "0"}
        await worker.task

    asyncio.run(body())


def test_the_shell_may_be_first() -> None:
    async def body() -> None:
        worker = Worker()
        assert await worker.seat.take({}) == INSTANCE

    asyncio.run(body())


def test_it_leaves_and_comes_back_with_other_data() -> None:
    async def body() -> None:
        worker = Worker()
        await worker.seat.leave()
        await worker.seat.take({"epoch": "1"})
        await worker.seat.take({"epoch": "2"})
        assert json.loads(worker.discovery.cards[INSTANCE]) == {"epoch": "1"}
        await worker.seat.leave()
        await worker.seat.leave()
        assert (worker.discovery.instances, worker.discovery.cards) == (set(), {})
        worker.discovery.calls.clear()
        assert await worker.seat.take({"epoch": "3"}) == INSTANCE
        assert worker.discovery.calls == ["register_model", "register_endpoint"]
        assert json.loads(worker.discovery.cards[INSTANCE]) == {"epoch": "3"}

    asyncio.run(body())


@pytest.mark.parametrize("broken", ["register_model", "register_endpoint"])
def test_a_failed_return_leaves_nothing_visible_and_may_be_tried_again(broken: str) -> None:
    async def body() -> None:
        worker = Worker()
        await worker.seat.take({})
        await worker.seat.leave()
        worker.discovery.broken = broken
        with pytest.raises(RegistrationFailed, match="Dynamo says no"):
            await worker.seat.take({})
        assert (worker.discovery.instances, worker.discovery.cards) == (set(), {})
        worker.discovery.broken = ""
        assert await worker.seat.take({}) == INSTANCE

    asyncio.run(body())


def test_a_worker_that_never_comes_to_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(vllm_seat, "_TIMEOUT_S", 0.01)
        discovery = Discovery()
        seat = ReplicaSeat(discovery.register_model, discovery.unregister_model)
        with pytest.raises(RegistrationFailed, match="TimeoutError"):
            await seat.take({})
        assert seat.state is SeatState.BEGINNING

    asyncio.run(body())


def test_a_model_is_registered_once() -> None:
    async def body() -> None:
        worker = Worker()
        await worker.seat.take({})
        with pytest.raises(IllegalTransition):
            await worker.seat.register_model("", "", worker.discovery, runtime_config=Card())

    asyncio.run(body())
