"""Our coordinator's steps on ranks of vLLM 0.33's own code: each is a half of an operation of
vLLM's, or nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from dynamo_elastic.testing.vllm_ranks import Group, Ranks
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, WorkerId

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(400)]

SIZE = 3
_TOKENS_TIMEOUT_S = 5.0


def connect(epoch: int, size: int) -> dict[str, Any]:
    """Parameters of connect_epoch."""
    members = tuple(Member(WorkerId(f"w{r}"), Incarnation("i")) for r in range(size))
    topology = msgspec.to_builtins(Topology(Epoch(epoch), members))
    return {"topology": topology, "endpoints": {}, "timeout_s": 30.0}


def narrower(engines: Engines, size: int) -> None:
    """Return once its first `size` ranks serve as a group of that many, by themselves."""
    deadline_s = time.monotonic() + _TOKENS_TIMEOUT_S
    while not all(engines.group.facts(rank)["width"] == size for rank in range(size)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    engines.serve_on(range(size))


class Engines:
    """The engines of a group, asked by rank, and the steps of an operation."""

    def __init__(
        self, ranks: Ranks, faults: Mapping[int, str] | None = None, **environment: str
    ) -> None:
        self._ranks = ranks
        environment |= {"DYNAMO_ELASTIC_VLLM_PARK_LEAVERS": "1"}
        self.group = Group(ranks, SIZE, faults=faults, **environment)

    def tell(self, rank: int, name: str, /, **params: Any) -> None:
        self._ranks.tell(to=rank, do="engine", name=name, params=params)

    def hear(self, rank: int, name: str) -> dict[str, Any]:
        return self._ranks.hear(lambda w: w.get("from") == rank and w.get("call") == name)

    def on(self, ranks: range, name: str, **params: Any) -> list[Any]:
        """Answers of all, which are asked at once. Asserts that none has refused."""
        for rank in ranks:
            self.tell(rank, name, **params)
        said = [self.hear(rank, name) for rank in ranks]
        assert [words["error"] for words in said] == [""] * len(said)
        return [words["answer"] for words in said]

    def prepare(self, epoch: int, size: int) -> None:
        for rank in range(size):
            self.tell(rank, "open_epoch", epoch=epoch, rank=rank, world_size=size)
            assert self.hear(rank, "open_epoch")["error"] == ""
        self.on(range(size), "connect_epoch", **connect(epoch, size))

    def commit(self, epoch: int, size: int) -> None:
        self.on(range(size), "decide", epoch=epoch)
        self.on(range(size), "wait_switched", epoch=epoch, timeout_s=20.0)

    def scale(self, epoch: int, size: int) -> None:
        self.prepare(epoch, size)
        self.commit(epoch, size)

    def drain(self, rank: int) -> None:
        self.on(range(rank, rank + 1), "drain", short_tokens=0, timeout_s=0.1)

    def states(self) -> list[tuple[str, int]]:
        said = self.on(range(SIZE), "status")
        return [(s["state"], s["world_size"]) for s in said]

    def serve_on(self, ranks: range) -> None:
        """Each of them makes tokens."""
        before = [self.group.facts(rank)["tokens"] for rank in ranks]
        deadline_s = time.monotonic() + _TOKENS_TIMEOUT_S
        while not all(self.group.facts(r)["tokens"] > before[r] for r in ranks):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.fixture
def engines(ranks: Ranks) -> Iterator[Engines]:
    made = Engines(ranks)
    made.scale(1, SIZE)  # of founders: it is in force already
    yield made
    made.group.lose(*sorted(made.group.alive))


def test_down_and_up_again_twice(engines: Engines) -> None:
    for epoch in (2, 4):
        engines.drain(2)
        engines.scale(epoch, 2)
        engines.on(range(2, 3), "detach")
        assert engines.states() == [("serving", 2), ("serving", 2), ("attached", 0)]
        engines.serve_on(range(2))
        engines.prepare(epoch + 1, 3)
        probes = engines.on(range(SIZE), "check", digests={})
        assert len({p["probe"] for p in probes}) == 1  # the joiner has the weights of the others
        engines.commit(epoch + 1, 3)
        assert engines.states() == [("serving", 3)] * 3
        engines.serve_on(range(SIZE))


def test_what_is_ready_can_be_given_up_and_the_leaver_stays(engines: Engines) -> None:
    engines.drain(2)
    engines.prepare(2, 2)
    engines.on(range(2), "abort_epoch", epoch=2)
    engines.on(range(2, 3), "readmit")
    assert engines.states() == [("serving", 3)] * 3
    engines.serve_on(range(SIZE))
    engines.drain(2)
    engines.scale(3, 2)
    assert engines.states()[:2] == [("serving", 2)] * 2


def test_a_decision_that_one_rank_has_missed_is_withdrawn(engines: Engines) -> None:
    engines.drain(2)
    engines.prepare(2, 2)
    engines.on(range(1), "decide", epoch=2)
    engines.tell(0, "wait_switched", epoch=2, timeout_s=0.5)
    assert "no switch to epoch 2" in engines.hear(0, "wait_switched")["error"]
    engines.on(range(2), "abort_epoch", epoch=2)
    engines.tell(1, "decide", epoch=2)
    assert "not open" in engines.hear(1, "decide")["error"]
    engines.on(range(2, 3), "readmit")
    assert engines.states() == [("serving", 3)] * 3
    engines.serve_on(range(SIZE))
    engines.drain(2)
    engines.scale(3, 2)


def test_a_joiner_that_dies_when_it_is_ready_costs_nothing(engines: Engines) -> None:
    engines.drain(2)
    engines.scale(2, 2)
    engines.on(range(2, 3), "detach")
    engines.prepare(3, 3)
    engines.group.lose(2)
    engines.on(range(2), "abort_epoch", epoch=3)
    said = engines.on(range(2), "status")
    assert [(s["state"], s["world_size"]) for s in said] == [("serving", 2)] * 2
    engines.serve_on(range(2))
    # The next operation is looked at at once; one rank has too few slots for all experts.
    engines.drain(1)
    engines.tell(0, "open_epoch", epoch=4, rank=0, world_size=1)
    assert engines.hear(0, "open_epoch")["error"] == ""
    engines.tell(0, "connect_epoch", **connect(4, 1))
    assert "retain all model experts" in engines.hear(0, "connect_epoch")["error"]
    engines.on(range(1, 2), "readmit")
    engines.serve_on(range(2))


def test_an_eviction_finds_the_group_without_the_rank_that_died(engines: Engines) -> None:
    engines.group.lose(2)
    narrower(engines, 2)
    engines.scale(2, 2)
    said = engines.on(range(2), "status")
    assert [(s["state"], s["world_size"]) for s in said] == [("serving", 2)] * 2
    engines.group.join()
    for rank in range(2):
        engines.tell(rank, "open_epoch", epoch=3, rank=rank, world_size=3)
        assert engines.hear(rank, "open_epoch")["error"] == ""
    engines.on(range(2), "connect_epoch", **connect(3, 3))
    engines.commit(3, 2)
    engines.serve_on(range(3))


def test_a_rank_that_stands_still_is_done_without_and_named(ranks: Ranks) -> None:
    """Its process lives: that the others step without it is all that a coordinator can know."""
    engines = Engines(ranks, {2: "stop-step"}, DYNAMO_ELASTIC_VLLM_STEP_TIMEOUT_S="1")
    try:
        engines.scale(1, SIZE)
        narrower(engines, 2)
        assert [s["masked"] for s in engines.on(range(2), "status")] == [[2], [2]]
        engines.scale(2, 2)
        assert [s["masked"] for s in engines.on(range(2), "status")] == [[], []]
        engines.serve_on(range(2))
    finally:
        engines.group.lose(*sorted(engines.group.alive))


def test_a_leaver_dies_when_all_are_ready_to_go_on_without_it(engines: Engines) -> None:
    engines.drain(2)
    engines.prepare(2, 2)
    engines.group.lose(2)
    narrower(engines, 2)
    engines.on(range(2), "abort_epoch", epoch=2)
    engines.scale(3, 2)
    said = engines.on(range(2), "status")
    assert [(s["state"], s["epoch"], s["world_size"]) for s in said] == [("serving", 3, 2)] * 2
    engines.serve_on(range(2))


def test_an_epoch_is_aborted_while_its_ranks_go_on_without_one(ranks: Ranks) -> None:
    """Their coordinator gives up what it is at when a rank dies: it gave up their going on as well,
    and they ended with it."""
    engines = Engines(ranks, {1: "late-commit"})
    try:
        engines.scale(1, SIZE)
        engines.prepare(2, 2)
        engines.group.lose(2)
        time.sleep(1.0)  # They have agreed, and wait for the late one.
        engines.on(range(2), "abort_epoch", epoch=2)
        narrower(engines, 2)
        engines.scale(3, 2)
        engines.serve_on(range(2))
    finally:
        engines.group.lose(*sorted(engines.group.alive))
