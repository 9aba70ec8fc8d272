"""Requests: what the engine is asked, and what each end means to Dynamo's frontend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_elastic.engine.base import EngineState, Request
from dynamo_elastic.errors import EngineGone, RequestMoved, RequestRefused
from dynamo_elastic.testing.engine import FakeEngine, fake_tokens
from dynamo_elastic.testing.virtual_time import run
from dynamo_elastic.types import WorkerId
from dynamo_elastic.worker.requests import RequestDesk, engine_request

TOKENS = list(fake_tokens(Request("r", (1, 2, 3), 5, seed=7), 5))


class FakeContext:
    def __init__(self, request_id: str = "r1") -> None:
        self._id = request_id
        self.stopped: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def id(self) -> str:
        return self._id

    def async_killed_or_stopped(self) -> asyncio.Future[bool]:
        return self.stopped


def dynamo_request(**changes: Any) -> dict[str, Any]:
    request: dict[str, Any] = {
        "token_ids": [1, 2, 3],
        "sampling_options": {"seed": 7, "temperature": 0.5, "n": None},
        "stop_conditions": {"max_tokens": 5, "ignore_eos": None},
        "output_options": {"logprobs": None},
        "eos_token_ids": [2],
    }
    return request | changes


def test_fields_are_carried_over() -> None:
    stop = {"max_tokens": 5, "stop_token_ids": [9], "stop_token_ids_hidden": [8]}
    asked = engine_request(dynamo_request(stop_conditions=stop), "c", "r", 100)
    assert (asked.prompt, asked.max_tokens, asked.seed) == ((1, 2, 3), 5, 7)
    assert (asked.temperature, asked.stop_tokens) == (0.5, (2, 8, 9))


def test_ignore_eos_keeps_only_what_the_client_asked_for() -> None:
    stop = {"max_tokens": 5, "stop_token_ids": [9], "ignore_eos": True}
    assert engine_request(dynamo_request(stop_conditions=stop), "c", "r", 100).stop_tokens == (9,)


def test_without_a_limit_the_context_is_the_limit() -> None:
    assert engine_request(dynamo_request(stop_conditions={}), "c", "r", 10).max_tokens == 7


def test_a_seed_of_ours_depends_on_the_frontends_id_alone() -> None:
    first = dynamo_request(sampling_options={})
    moved = first | {"token_ids": [1, 2, 3, 44, 55]}
    seed = engine_request(first, "id-a", "r/1", 100).seed
    assert seed == engine_request(moved, "id-a", "r/2", 100).seed
    assert seed != engine_request(first, "id-b", "r/1", 100).seed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [1] * 100}, "prompt"),
        ({"sampling_options": {"n": 2}}, "n"),
        ({"sampling_options": {"top_p": 0.5}}, "top_p"),
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding"),
        ({"output_options": {"logprobs": 1}}, "logprobs"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused, match=f"^{field}: "):
        engine_request(dynamo_request(**changes), "c", "r", 100)


async def collect(desk: RequestDesk, context: FakeContext, **changes: Any) -> list[dict[str, Any]]:
    return [item async for item in desk.handle(dynamo_request(**changes), context)]


def tokens(items: list[dict[str, Any]]) -> list[int]:
    return [t for item in items for t in item["token_ids"]]


class Bench:
    """A desk, its engine and its reader."""

    def __init__(self) -> None:
        self.engine = FakeEngine(WorkerId("slot0"), state=EngineState.SERVING)
        self.desk = RequestDesk(max_context=100)
        self.desk.open(self.engine)
        self.reader = asyncio.create_task(self.desk.pump(self.engine))
        self.steps = asyncio.create_task(self._step())

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.engine.step()


def test_a_request_runs_to_its_end() -> None:
    async def main() -> None:
        bench = Bench()
        items = await collect(bench.desk, FakeContext())
        assert tokens(items) == TOKENS
        assert [i.get("finish_reason") for i in items] == [None] * 4 + ["length"]
        assert "cancel" not in bench.engine.calls
        await bench.desk.idle()

    run(main())


def test_a_moved_request_goes_on_with_the_same_tokens() -> None:
    async def main() -> None:
        here, there, got = Bench(), Bench(), list[int]()

        async def until_moved() -> None:
            async for item in here.desk.handle(dynamo_request(), FakeContext()):
                got.extend(item["token_ids"])
                if len(got) == 2:
                    await here.engine.drain(short_tokens=0, timeout_s=1.0)

        with pytest.raises(RequestMoved):
            await until_moved()
        rest = {"max_tokens": 5 - len(got)}
        prompt = [1, 2, 3, *got]
        got += tokens(
            await collect(there.desk, FakeContext(), token_ids=prompt, stop_conditions=rest)
        )
        assert got == TOKENS

    run(main())


def test_requests_of_a_dead_engine_move() -> None:
    async def main() -> None:
        bench = Bench()
        pending = asyncio.create_task(collect(bench.desk, FakeContext()))
        await asyncio.sleep(0.025)
        bench.engine.die()
        with pytest.raises(RequestMoved):
            await pending
        with pytest.raises(EngineGone):
            await bench.reader

    run(main())


def test_a_closed_desk_and_a_draining_engine_admit_nothing() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.engine.drain(short_tokens=0, timeout_s=1.0)
        with pytest.raises(RequestMoved):
            await collect(bench.desk, FakeContext())
        bench.desk.close()
        with pytest.raises(RequestMoved):
            await collect(bench.desk, FakeContext())

    run(main())


def test_a_client_that_goes_cancels_its_request() -> None:
    async def main() -> None:
        bench, context = Bench(), FakeContext()
        pending = asyncio.create_task(collect(bench.desk, context))
        await asyncio.sleep(0.025)
        context.stopped.set_result(True)
        assert len(tokens(await pending)) == 2
        assert bench.engine.calls[-1] == "cancel"
        await bench.desk.idle()

    run(main())
