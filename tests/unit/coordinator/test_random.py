"""Random misfortune: whatever goes wrong, the deployment ends whole and can be scaled again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dynamo_elastic import failpoints
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.phases import Kind, Step, phases_of
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import CONFIG, Crash, World, world
from dynamo_elastic.testing.participants import FakeShell, Misbehaviour, Script, running
from dynamo_elastic.testing.store import FakeStore, Fault, FaultKind, FaultyStore
from dynamo_elastic.topology import EngineShape

# Every rank has room for every expert, so that no loss of a rank is a loss of experts.
SHAPE = EngineShape(num_experts=4, slots_per_rank=4)
POINTS = sorted(
    {f"scale.{when}_{p}" for kind in Kind for p in phases_of(kind) for when in ("before", "after")}
    | {"scale.before_abort", "scale.before_close"}
)


@dataclass(frozen=True)
class Round:
    """One target, and what goes wrong while it is followed."""

    ranks: int
    acts: tuple[tuple[int, Step, Misbehaviour], ...]
    crash_at: str | None
    fault: FaultKind | None
    at_write: int


ROUNDS = st.builds(
    Round,
    ranks=st.integers(0, 5),
    acts=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from(list(Step)), st.sampled_from(list(Misbehaviour))
        ),
        max_size=2,
    ).map(tuple),
    crash_at=st.none() | st.sampled_from(POINTS),
    fault=st.none() | st.sampled_from(list(FaultKind)),
    at_write=st.integers(0, 30),
)


async def coordinate(here: World, view: FaultyStore) -> None:
    """Coordinators, one after the other: each lives until it crashes."""
    while True:
        deployment = Deployment(here.keys, CONFIG, SHAPE, now=virtual_time.wall_clock)
        try:
            await Coordinator(view, deployment, "c").run()
        except Crash:
            failpoints.set_hook(None)


def crash_once(name: str | None) -> None:
    def hook(at: str) -> None:
        if at == name:
            raise Crash(at)

    failpoints.set_hook(hook)


async def play(rounds: list[Round]) -> None:
    async with world(FakeStore()) as here:
        view = FaultyStore(here.store)
        coordinators = asyncio.create_task(coordinate(here, view))
        await here.until(CONFIG.initial_ranks, timeout_s=300)
        for one in rounds:
            for slot, step, misbehaviour in one.acts:
                here[slot].script = Script({step: misbehaviour})
            if one.fault:
                view.faults = [Fault(one.fault, at_write=view.writes + one.at_write)]
            crash_once(one.crash_at)
            await request_scale(here.store, here.keys, one.ranks, "test")
            await asyncio.sleep(120)
        failpoints.set_hook(None)
        view.faults.clear()
        await settle(here)
        coordinators.cancel()
        await asyncio.wait({coordinators})


async def settle(here: World) -> None:
    """The dead come back, nothing goes wrong any more: every width can be had."""
    topology = (await here.status()).topology
    for shell in here.shells.values():
        shell.script = Script({})
        if shell.alive and topology is not None and shell.worker_id not in topology.worker_ids:
            await shell.stand_by()
    dead = [shell for shell in here.shells.values() if not shell.alive]
    slots = [int(shell.worker_id.removeprefix("slot")) for shell in dead]
    async with running(FakeShell(here.store, here.keys, slot) for slot in slots) as back:
        here.shells |= {shell.worker_id: shell for shell in back}
        for ranks in (2, 4, 3):
            await request_scale(here.store, here.keys, ranks, "test")
            await here.until(ranks, timeout_s=600)
            assert await here.faults() == []


# Not shrunk: that takes minutes, and a script of two or three rounds can be read as it is.
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(rounds=st.lists(ROUNDS, min_size=1, max_size=3))
def test_it_always_ends_whole(rounds: list[Round]) -> None:
    try:
        virtual_time.run(play(rounds))
    finally:
        failpoints.set_hook(None)
