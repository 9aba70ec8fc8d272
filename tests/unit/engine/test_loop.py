"""The step loop of one rank, round by round, against peers whose every word is scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from dynamo_elastic.engine.base import EngineState, Finish, Output, Request
from dynamo_elastic.engine.reference.checkpoint import load_weights
from dynamo_elastic.engine.reference.device import HostExecutor
from dynamo_elastic.engine.reference.experts import LocalExperts
from dynamo_elastic.engine.reference.kv import KvCache
from dynamo_elastic.engine.reference.loop import StepLoop
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.reference.membership import (
    ControlRecord,
    Membership,
    decode_records,
    encode_record,
)
from dynamo_elastic.engine.reference.model import Model, TileSize, Weights
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.engine.reference.scheduler import Scheduler
from dynamo_elastic.errors import EngineError
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.topology import EMPTY, Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

TILE = TileSize(batch_tokens=4, max_context=32)
ALL = tuple(range(SMALL_SHAPE.num_experts))
NONE_HELD = (EMPTY,) * SMALL_SHAPE.num_experts
ME = Rank(0)

T = TypeVar("T")


class ScriptedGroup:
    """An ExpertGroup of us and one peer that echoes our record, with what `peer` changes in it."""

    def __init__(self, epoch: int, world_size: int = 2) -> None:
        self.epoch = Epoch(epoch)
        self.rank = ME
        self.world_size = world_size
        self.address = ""
        self.masked: frozenset[Rank] = frozenset()
        self.peer: dict[str, object] = {}
        self.said: list[ControlRecord] = []
        self.exchanges = 0
        self.lose_peer_in_exchange = False
        self.here = True
        self.closed = False

    def connect(self, addresses: Mapping[Rank, str], *, timeout_s: float) -> None: ...

    def arrived(self, ranks: Sequence[Rank]) -> bool:
        return self.here

    def control(self, record: bytes, *, timeout_s: float) -> Mapping[Rank, bytes]:
        own = decode_records({ME: record})[ME]
        self.said.append(own)
        quiet = ControlRecord(False, False, own.ready, Epoch(0), own.placement, ())
        fields = {f: getattr(quiet, f) for f in quiet.__struct_fields__} | self.peer
        peers = {
            Rank(r): encode_record(ControlRecord(**fields))
            for r in range(1, self.world_size)
            if r not in self.masked
        }
        return {ME: record, **peers}

    def exchange(self, payloads: Mapping[Rank, bytes], *, timeout_s: float) -> Mapping[Rank, bytes]:
        self.exchanges += 1
        if self.lose_peer_in_exchange:
            self.masked = frozenset({Rank(1)})
        return {rank: payload for rank, payload in payloads.items() if rank == ME}

    def close(self) -> None:
        self.closed = True


class Bench:
    """A step loop that holds every expert, in epoch 1 with a peer that holds none."""

    def __init__(
        self, model_dir: Path, *, rounds: int = 2, experts_awaited_s: float = 60.0
    ) -> None:
        weights = Weights(SMALL_SHAPE, len(ALL))
        load_weights(model_dir, weights, ALL)
        self.outputs: list[Output] = []
        self.loop = StepLoop(
            HostExecutor(
                Model(weights, TILE),
                KvCache(SMALL_SHAPE, blocks=8),
                LocalExperts(weights, TILE.batch_tokens),
                peer_timeout_s=1.0,
            ),
            Scheduler(TILE, 8, SMALL_SHAPE.vocab_size),
            self.outputs.extend,
            peer_timeout_s=1.0,
            experts_awaited_s=experts_awaited_s,
        )
        self.group = ScriptedGroup(1)
        self.join(self.group)
        self.rounds(rounds)

    def join(self, group: ScriptedGroup) -> None:
        self.pend(group)
        self.loop.decide(group.epoch)

    def pend(self, group: ScriptedGroup) -> None:
        members = [Member(WorkerId("w0"), Incarnation(""), ALL)]
        members += [
            Member(WorkerId(f"w{r}"), Incarnation(""), NONE_HELD)
            for r in range(1, group.world_size)
        ]
        topology = Topology(group.epoch, tuple(members))
        self.loop.set_pending(Membership(group, topology, SMALL_SHAPE.num_experts))

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.loop.round()

    def tokens(self, request_id: str = "r") -> tuple[int, ...]:
        return tuple(t for o in self.outputs if o.request_id == request_id for t in o.tokens)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SMALL_SHAPE)
    return directory


@pytest.fixture
def bench(model_dir: Path) -> Bench:
    return Bench(model_dir)


def test_a_new_group_proves_itself_with_a_step(bench: Bench) -> None:
    assert bench.loop.state is EngineState.SERVING
    assert bench.group.said[0].go
    assert bench.loop.switched(Epoch(1)).done()


def test_a_step_is_announced_one_round_before(bench: Bench) -> None:
    bench.rounds(2)
    bench.group.exchanges = 0
    bench.group.peer = {"work": True}
    bench.rounds(1)
    assert bench.group.exchanges == 0
    bench.group.peer = {}
    bench.rounds(1)
    assert bench.group.said[-1].go
    assert bench.group.exchanges == 2 * SMALL_SHAPE.num_hidden_layers
    bench.group.exchanges = 0
    bench.group.peer = {"go": True}
    bench.rounds(1)
    assert bench.group.exchanges > 0


def test_tokens_are_those_of_the_oracle(bench: Bench, model_dir: Path) -> None:
    request = Request("r", (1, 2, 3, 4, 5, 6), 5, seed=3)
    bench.loop.submit(request)
    bench.rounds(12)
    assert bench.tokens() == Oracle(model_dir, TILE).generate(request)
    assert bench.outputs[-1].finish is Finish.LENGTH


def test_a_step_in_which_a_peer_was_lost_is_run_again(bench: Bench, model_dir: Path) -> None:
    request = Request("r", (1, 2, 3), 2, seed=3)
    bench.loop.submit(request)
    bench.group.lose_peer_in_exchange = True
    steps = bench.loop.step
    while not bench.group.masked:
        bench.rounds(1)
    assert (bench.loop.step, bench.outputs) == (steps, [])
    bench.rounds(4)
    assert bench.tokens() == Oracle(model_dir, TILE).generate(request)


def test_the_switch_waits_for_all_and_is_announced(bench: Bench) -> None:
    new = ScriptedGroup(2)
    new.here = False
    bench.join(new)
    bench.rounds(3)
    assert bench.group.said[-1].ready == 1
    new.here = True
    bench.group.peer = {"ready": Epoch(1)}
    bench.rounds(3)
    assert bench.group.said[-1].ready == 2
    assert bench.loop.current is not None
    assert bench.loop.current.epoch == 1
    bench.group.peer = {"ready": Epoch(2)}
    bench.rounds(2)
    assert bench.group.said[-1].commit == 2
    assert bench.loop.current.epoch == 2
    assert not bench.group.closed
    bench.rounds(1)
    assert bench.group.closed
    assert bench.loop.switched(Epoch(2)).result(0).epoch == 2


def test_the_old_group_is_kept_until_a_step_was_right(bench: Bench) -> None:
    new = ScriptedGroup(2)
    new.lose_peer_in_exchange = True
    bench.join(new)
    bench.rounds(3)
    assert bench.loop.current is not None
    assert bench.loop.current.epoch == 2
    assert not bench.group.closed
    bench.rounds(1)
    assert bench.group.closed


def test_a_rank_without_a_place_in_the_next_epoch_leaves(bench: Bench) -> None:
    bench.loop.submit(Request("r", (1,), 20))
    bench.group.peer = {"commit": Epoch(2)}
    bench.rounds(1)
    assert bench.loop.state is EngineState.LEFT
    assert bench.outputs[-1].finish is Finish.MOVED
    assert not bench.group.closed
    bench.loop.disconnect(Epoch(2))
    assert bench.group.closed


def test_a_decision_is_taken_back_in_a_round_before_its_group_is_closed(bench: Bench) -> None:
    new = ScriptedGroup(2)
    bench.join(new)
    bench.group.peer = {"ready": Epoch(1)}
    bench.rounds(1)
    assert bench.group.said[-1].ready == 2
    bench.loop.withdraw(Epoch(2))
    assert not new.closed
    with pytest.raises(EngineError, match="not connected"):
        bench.loop.decide(Epoch(2))
    bench.group.peer = {"ready": Epoch(2)}
    bench.rounds(1)
    assert bench.group.said[-1].ready == 1
    assert new.closed
    assert bench.loop.pending is None
    bench.rounds(2)
    assert bench.group.said[-1].commit == 0


def test_a_switch_that_a_peer_had_announced_is_made_though_it_was_to_be_dropped(
    bench: Bench,
) -> None:
    bench.join(ScriptedGroup(2))
    bench.group.peer = {"ready": Epoch(1)}
    bench.rounds(1)
    bench.loop.withdraw(Epoch(2))
    bench.group.peer = {"commit": Epoch(2)}
    bench.rounds(1)
    assert bench.loop.current is not None
    assert bench.loop.current.epoch == 2


def test_a_switch_that_was_announced_is_made_though_it_was_to_be_dropped(bench: Bench) -> None:
    bench.join(ScriptedGroup(2))
    bench.rounds(1)
    bench.loop.withdraw(Epoch(2))
    bench.rounds(1)
    assert bench.loop.current is not None
    assert bench.loop.current.epoch == 2


def test_a_pending_epoch_that_is_not_decided_is_dropped_at_once(bench: Bench) -> None:
    new = ScriptedGroup(2)
    bench.pend(new)
    bench.rounds(3)
    bench.loop.withdraw(Epoch(1))
    assert not new.closed
    bench.loop.withdraw(Epoch(2))
    assert new.closed
    with pytest.raises(EngineError, match="not connected"):
        bench.loop.decide(Epoch(2))


def test_a_pending_epoch_is_not_replaced_unasked(bench: Bench) -> None:
    bench.pend(ScriptedGroup(2))
    with pytest.raises(EngineError, match="epoch 2 is pending"):
        bench.pend(ScriptedGroup(3))


def test_a_rank_that_lost_its_group_does_not_enter_an_epoch_that_was_taken_back(
    bench: Bench,
) -> None:
    new = ScriptedGroup(2)
    bench.join(new)
    bench.loop.withdraw(Epoch(2))
    bench.group.peer = {"masked": (ME,)}
    bench.rounds(2)
    assert bench.loop.state is EngineState.ATTACHED
    assert new.closed


def lose_experts(bench: Bench) -> Topology:
    """The peer goes, and with it the only holder of an expert; returns who held what before."""
    assert bench.loop.current is not None
    installed = bench.loop.current.installed
    first, second = installed.members
    split = replace(
        installed,
        members=(
            replace(first, experts=(*ALL[:-1], EMPTY)),
            replace(second, experts=(ALL[-1], *NONE_HELD[1:])),
        ),
    )
    bench.loop.install(split)
    bench.rounds(1)
    bench.loop.submit(Request("r", (1, 2, 3), 6))
    bench.rounds(3)
    bench.group.masked = frozenset({Rank(1)})
    bench.rounds(1)
    return installed


def test_requests_wait_for_lost_experts_and_go_on_where_they_were(
    bench: Bench, model_dir: Path
) -> None:
    oracle = Oracle(model_dir, TILE)
    installed = lose_experts(bench)
    bench.loop.submit(Request("s", (1,), 2))
    before = list(bench.outputs)
    bench.rounds(20)
    assert bench.outputs == before
    bench.loop.install(installed)
    bench.rounds(20)
    assert bench.tokens("r") == oracle.generate(Request("r", (1, 2, 3), 6))
    assert bench.tokens("s") == oracle.generate(Request("s", (1,), 2))


def test_experts_that_do_not_come_back_end_requests(model_dir: Path) -> None:
    bench = Bench(model_dir, experts_awaited_s=0.0)
    lose_experts(bench)
    bench.rounds(1)
    assert bench.outputs[-1].finish is Finish.FAILED
    with pytest.raises(EngineError, match="lost"):
        bench.loop.submit(Request("s", (1,), 1))


def test_a_rank_that_its_peers_masked_steps_out(bench: Bench) -> None:
    bench.loop.submit(Request("r", (1,), 20))
    bench.group.peer = {"masked": (ME,)}
    bench.rounds(1)
    assert bench.loop.state is EngineState.ATTACHED
    assert bench.outputs[-1].finish is Finish.FAILED
    assert bench.group.closed


def test_a_joiner_that_nobody_joins_steps_out(model_dir: Path) -> None:
    bench = Bench(model_dir, rounds=1)
    assert not bench.group.closed
    bench.group.masked = frozenset({Rank(1)})
    bench.rounds(1)
    assert bench.loop.state is EngineState.ATTACHED
    assert bench.group.closed
    # Who waits for its switch hears so at once, not when its time is over.
    assert isinstance(bench.loop.switched(Epoch(1)).exception(0), EngineError)


def test_a_proven_rank_whose_peers_are_lost_serves_on(bench: Bench) -> None:
    bench.group.masked = frozenset({Rank(1)})
    bench.rounds(2)
    assert bench.loop.state is EngineState.SERVING


def test_calls_run_between_steps_and_report_errors(bench: Bench) -> None:
    good: Future[int] = bench.loop.calls.put(lambda: 7)
    bad: Future[None] = bench.loop.calls.put(lambda: bench.loop.decide(Epoch(9)))
    bench.loop.calls.run(wait_s=0.0)
    assert good.result(0) == 7
    with pytest.raises(EngineError):
        bad.result(0)
