"""Control routes on a store in memory and a coordinator that is a script."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dynamo_elastic.coordinator.records import (
    CapacityRecord,
    Keys,
    MemberRecord,
    MemberState,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
    decode,
    encode,
)
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import run
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId
from dynamo_elastic.worker.control import ElasticControl

KEYS, ME = Keys("test"), WorkerId("slot1")
TOKEN = "token-1"


class Bench:
    """Three ranks serve; legal are `legal`."""

    def __init__(self) -> None:
        self.store = FakeStore()
        control = ElasticControl(self.store, KEYS, ME, operation_timeout_s=300.0, token=TOKEN)
        self.routes = control.routes()

    async def fill(self, *, legal: tuple[int, ...] = (2, 3, 4)) -> None:
        names = [WorkerId(f"slot{k}") for k in range(3)]
        ranks = tuple(Member(n, Incarnation("i")) for n in names)
        ops = [
            Put(KEYS.topology, encode(Topology(Epoch(7), ranks))),
            Put(KEYS.capacity, encode(CapacityRecord(3, legal, 4))),
        ]
        for k, name in enumerate(names):
            record = MemberRecord(name, k, "host", k, MemberState.SERVING, Incarnation("i"))
            ops.append(Put(KEYS.member(name), encode(record)))
        await self.store.txn([], ops)

    async def call(self, name: str, **body: Any) -> dict[str, Any]:
        return await self.routes[name]({"token": TOKEN, **body})

    @property
    def target(self) -> TargetRecord | None:
        stored = self.store.data.get(KEYS.target)
        return None if stored is None else decode(TargetRecord, stored.value)


def scenario(main: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        run(main(Bench()))

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test


@scenario
async def test_status_says_who_and_what(bench: Bench) -> None:
    await bench.fill()
    answer = await bench.call("elastic_status")
    assert (answer["status"], answer["worker"], answer["rank"]) == ("ok", "slot1", 1)
    assert answer["state"] == "serving"
    assert answer["capacity"]["legal"] == [2, 3, 4]
    assert (answer["deployment"]["epoch"], answer["deployment"]["width"]) == (7, 3)


@scenario
async def test_scale_writes_a_target_that_names_its_source(bench: Bench) -> None:
    await bench.fill()
    outcome = TargetOutcome("mine", 4, OutcomeStatus.REACHED, operation_id=OperationId("op-9"))
    await bench.store.txn([], [Put(KEYS.outcome, encode(outcome))])
    answer = await bench.call("scale_elastic", target=4, request_id="mine")
    assert (answer["status"], answer["state"], answer["operation_id"]) == ("ok", "reached", "op-9")
    answer = await bench.call("scale_elastic", target=2, request_id="next")
    assert answer["state"] == "accepted"
    assert "has not answered" in answer["message"]
    assert bench.target is not None
    assert (bench.target.ranks, bench.target.source, bench.target.detail) == (2, "control", "slot1")


@scenario
async def test_what_the_coordinator_refuses_is_an_error(bench: Bench) -> None:
    await bench.fill()
    outcome = TargetOutcome("mine", 9, OutcomeStatus.REFUSED, "target 9: scale.max_ranks is 4")
    await bench.store.txn([], [Put(KEYS.outcome, encode(outcome))])
    answer = await bench.call("scale_elastic", target=9, request_id="mine")
    assert (answer["status"], answer["state"]) == ("error", "refused")
    assert answer["message"] == "target 9: scale.max_ranks is 4"


@pytest.mark.parametrize(
    ("route", "body", "reason"),
    [
        ("scale_elastic", {}, "target: field required"),
        ("scale_elastic", {"target": "4"}, "target: input should be a valid integer"),
        ("scale_elastic", {"target": 4, "ranks": 4}, "ranks: extra inputs are not permitted"),
        ("park", {"rank": 1}, "rank: unknown"),
        ("elastic_status", {"x": 1}, "x: unknown"),
    ],
)
def test_bad_bodies_change_nothing(route: str, body: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.fill()
        answer = await bench.call(route, **body)
        assert answer["status"] == "error"
        assert reason in answer["message"]
        assert bench.target is None

    run(main())


@scenario
async def test_park_asks_for_the_next_legal_width_without_this_rank(bench: Bench) -> None:
    await bench.fill(legal=(1, 2, 4))
    assert (await bench.call("park"))["status"] == "ok"
    assert bench.target is not None
    assert (bench.target.ranks, bench.target.leaving) == (2, ME)
    assert (bench.target.source, bench.target.detail) == ("control", "park slot1")


@scenario
async def test_park_is_refused_where_no_smaller_width_is_legal(bench: Bench) -> None:
    await bench.fill(legal=(3, 4))
    answer = await bench.call("park")
    assert answer["status"] == "error"
    assert "no smaller width is legal (legal: 3, 4)" in answer["message"]
    assert bench.target is None


@scenario
async def test_park_of_a_worker_without_a_rank_is_refused(bench: Bench) -> None:
    answer = await bench.call("park")
    assert (answer["status"], bench.target) == ("error", None)
    assert "slot1 has no rank in force" in answer["message"]


@scenario
async def test_a_store_that_is_away_is_an_error(bench: Bench) -> None:
    bench.store.down = True
    for route in bench.routes:
        body = {"target": 4} if route == "scale_elastic" else {}
        assert (await bench.call(route, **body))["status"] == "error"


@pytest.mark.parametrize("route", ["elastic_status", "scale_elastic", "park"])
@pytest.mark.parametrize("token", [None, "", "token-2", "token-", ["token-1"]])
def test_without_the_token_nothing_is_told_or_done(route: str, token: Any) -> None:
    @scenario
    async def main(bench: Bench) -> None:
        await bench.fill()
        before = dict(bench.store.data)
        given = {} if token is None else {"token": token}
        answer = await bench.routes[route]({"target": 4, **given})
        assert answer == {
            "status": "error",
            "message": "token: is required, and must be what coordinator.api.token_file holds",
        }
        assert bench.store.data == before

    main()
