from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from dynamo_elastic.comm.base import MemoryKind, Span
from dynamo_elastic.comm.transfer_plan import Chunk, plan_dense
from dynamo_elastic.comm.weights import Destination, Limits, compare, digest, push
from dynamo_elastic.errors import (
    DigestMismatch,
    TransferError,
    TransferTimeout,
    TransferTooSlow,
)
from dynamo_elastic.failpoints import set_hook
from dynamo_elastic.memory.arena import HostArena, layout
from dynamo_elastic.testing.transfer import FakeFabric, FakeTransferAgent
from dynamo_elastic.types import WorkerId

ME, JOINERS = WorkerId("me"), [WorkerId("j0"), WorkerId("j1")]
SIZE = 100_000
PLENTY = Limits(window_bytes=40_000, transfer_timeout_s=5, timeout_s=10)
HURRIED = Limits(window_bytes=40_000, transfer_timeout_s=0.01, timeout_s=10)


@dataclass
class World:
    """A source with pseudo-random weights and two joiners with none, on a fake fabric."""

    fabric: FakeFabric
    agents: dict[WorkerId, FakeTransferAgent]
    arenas: dict[WorkerId, HostArena]
    plan: tuple[Chunk, ...]

    def push(self, limits: Limits = PLENTY) -> int:
        there = {w: Destination(w, self.span(w)) for w in JOINERS}
        source = self.agents[ME]
        return push(source, self.plan, self.span(ME), there, MemoryKind.DRAM, limits)

    def span(self, worker: WorkerId) -> Span:
        return Span(self.arenas[worker].address, self.arenas[worker].size_bytes)

    def digests(self, worker: WorkerId) -> dict[str, str]:
        arena = self.arenas[worker]
        return {r.name: digest(arena.view(r)) for r in arena.regions}


@pytest.fixture
def world() -> Iterator[World]:
    fabric = FakeFabric()
    arenas = {w: HostArena(layout([("a", 999), ("b", SIZE)])) for w in (ME, *JOINERS)}
    agents = {w: FakeTransferAgent(w, fabric) for w in arenas}
    for region in arenas[ME].regions:
        arenas[ME].view(region)[:] = bytes(i * i % 251 for i in range(region.size_bytes))
    plan = plan_dense(arenas[ME].regions, [ME], JOINERS, chunk_bytes=3_000)
    made = World(fabric, agents, arenas, plan)
    for worker, agent in agents.items():
        agent.register(made.span(worker))
        agents[ME].add_remote(agent.metadata())
    yield made
    set_hook(None)


def test_everything_lands_and_nothing_is_left_open(world: World) -> None:
    assert world.push() == 2 * (SIZE + 999)
    assert world.digests(JOINERS[0]) == world.digests(JOINERS[1]) == world.digests(ME)
    assert not world.agents[ME].open_transfers


def test_bytes_in_flight_stay_within_the_window(world: World) -> None:
    in_flight: list[int] = []

    def count(name: str) -> None:
        transfers = world.agents[ME].open_transfers
        in_flight.append(sum(t.size_bytes for t in transfers))

    set_hook(count)
    world.push()
    assert 0 < max(in_flight) <= PLENTY.window_bytes


def test_a_chunk_larger_than_the_window_still_goes(world: World) -> None:
    world.push(Limits(window_bytes=10, transfer_timeout_s=5, timeout_s=10))
    assert world.digests(JOINERS[1]) == world.digests(ME)


def test_a_joiner_that_dies_is_named_with_what_it_got(world: World) -> None:
    world.fabric.dies_after_bytes[JOINERS[1]] = 60_000
    with pytest.raises(TransferError) as caught:
        world.push()
    assert not isinstance(caught.value, TransferTimeout)
    assert caught.value.remote == JOINERS[1]
    assert 0 < caught.value.bytes_done <= 60_000
    assert not world.agents[ME].open_transfers


def test_a_joiner_that_was_gone_before_is_named(world: World) -> None:
    world.agents[JOINERS[0]].close()
    with pytest.raises(TransferError) as caught:
        world.push()
    assert (caught.value.remote, caught.value.bytes_done) == (JOINERS[0], 0)


def test_a_joiner_that_stops_is_a_timeout(world: World) -> None:
    world.fabric.stopped.add(JOINERS[1])
    with pytest.raises(TransferTimeout) as caught:
        world.push(HURRIED)
    assert caught.value.remote == JOINERS[1]
    assert not world.agents[ME].open_transfers


def test_the_whole_push_has_a_deadline_too(world: World) -> None:
    with pytest.raises(TransferTimeout):
        world.push(Limits(window_bytes=40_000, transfer_timeout_s=5, timeout_s=0))
    assert not world.agents[ME].open_transfers


def test_a_push_that_leaves_nvlink_is_ended(world: World) -> None:
    world.fabric.stopped.add(JOINERS[0])
    limits = Limits(window_bytes=40_000, transfer_timeout_s=5, timeout_s=10, floor_gbps=50)
    with pytest.raises(TransferTooSlow, match="left NVLink") as caught:
        world.push(limits)
    assert caught.value.remote == JOINERS[0]
    assert caught.value.gbps < 50
    assert not world.agents[ME].open_transfers


def test_a_transport_that_copies_while_it_posts_is_found_slow_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("dynamo_elastic.comm.weights.time.monotonic", lambda: now_s[0])

    def pass_time(name: str) -> None:
        now_s[0] += 0.06

    set_hook(pass_time)
    with pytest.raises(TransferTooSlow):
        world.push(Limits(window_bytes=4_000, transfer_timeout_s=5, timeout_s=10, floor_gbps=1))
    assert now_s[0] < 0.3
    assert not world.agents[ME].open_transfers


def test_a_push_above_its_floor_is_left_alone(world: World) -> None:
    limits = Limits(window_bytes=40_000, transfer_timeout_s=5, timeout_s=10, floor_gbps=1e-6)
    assert world.push(limits) == 2 * (SIZE + 999)


def test_a_crash_in_between_releases_what_is_in_flight(world: World) -> None:
    passed: list[str] = []

    def crash(name: str) -> None:
        passed.append(name)
        if len(passed) == 3:
            raise KeyboardInterrupt

    set_hook(crash)
    with pytest.raises(KeyboardInterrupt):
        world.push()
    assert set(passed) == {"weights.before_chunk"}
    assert not world.agents[ME].open_transfers


def test_digests_tell_which_regions_differ() -> None:
    good = {"a": digest(b"1"), "b": digest(b"2"), "c": digest(b"3")}
    compare(good, {**good, "extra": digest(b"4")}, remote="me")
    with pytest.raises(DigestMismatch) as caught:
        compare(good, {"a": good["a"], "b": digest(b"x")}, remote="me")
    assert caught.value.regions == ("b", "c")
    assert caught.value.remote == "me"


def test_a_digest_is_that_of_the_bytes_whatever_holds_them() -> None:
    expected = "06b05ab6733a618578af5f94892f3950"  # XXH3-128 of b"abc", as the reference gives it
    assert digest(b"abc") == digest(bytearray(b"abc")) == digest(memoryview(b"xabcx")[1:4])
    assert digest(b"abc") == expected
