"""One run: a resize, a fault in it, the recovery, and the verdict on all that was recorded."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

from dynamo_elastic.agent.base import SlotState
from dynamo_elastic.coordinator.records import MemberState, OutcomeStatus
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.errors import StoreError
from dynamo_elastic.failpoints import TRACE_FILE
from dynamo_elastic.testing.chaos.checker import Windows, check, longest_silence_s, lost
from dynamo_elastic.testing.chaos.faults import happened, inject, undo
from dynamo_elastic.testing.chaos.history import History
from dynamo_elastic.testing.chaos.scenario import (
    NARROW,
    WIDE,
    AtRandom,
    Resize,
    Scenario,
    cast,
)
from dynamo_elastic.testing.chaos.verdict import Verdict
from dynamo_elastic.testing.chaos.world import World
from dynamo_elastic.testing.rest import NotAtRest, at_rest, unrest

HANG_S = 60.0
"""Everything that a run waits for comes in this time, or the run hangs."""

_REACH_S = 25.0
"""For the resize with the fault in it to end, one way or the other."""

_POLL_S = 0.05
_LINGER_S = 2.0
"""What follows an operation: cards are refreshed, what it left is undone."""

WINDOWS = Windows(two_topologies_s=8.0, silence_s=12.0)
"""A switch is one step; an engine or a shell that stands still for 4 s is put out. A group waits
for a silent peer (engine.peer_timeout_s), for experts to be read again, for a joiner to start."""


class Hang(Exception):
    """Something that must come did not come in time."""


async def run(world: World, scenario: Scenario) -> tuple[Verdict, History]:
    """Play `scenario`. The world is at rest afterwards, unless the verdict says that it hangs."""
    place, act = scenario.cell
    process = scenario.fault.process
    verdict = Verdict(scenario.number, str(scenario), scenario.resize, place, process, act, False)
    history = world.history()
    try:
        await at_width(world, WIDE if scenario.ranks == NARROW else NARROW)
        await _prepare(world, scenario.resize)
        scenario = cast(scenario, await _in_order(world))
        began_s = time.monotonic()
        verdict.fired = await _resize(world, scenario)
        await undo(world)
        await at_width(world, scenario.ranks)
        await stream_ends(world)
        verdict.seconds = round(time.monotonic() - began_s, 3)
    except Hang as exc:
        verdict.hang = str(exc)
    await undo(world)
    take_in(history, world)
    return judged(verdict, history), history


async def _in_order(world: World) -> list[str]:
    """Who is who: ranks in force, in order, then those that stand by."""
    status = await _at_rest(world, time.monotonic() + HANG_S)
    ranks = status.in_force.worker_ids if status.in_force is not None else ()
    return [*ranks, *status.standby()]


async def passed(world: World, resize: Resize) -> dict[str, list[str]]:
    """Failpoints that are passed in `resize` without any fault, and by whom."""
    ranks = NARROW if resize is Resize.DOWN else WIDE
    await at_width(world, WIDE if ranks == NARROW else NARROW)
    await _prepare(world, resize)
    trace = world.failpoints / TRACE_FILE
    trace.touch()
    await at_width(world, ranks)
    await asyncio.sleep(_LINGER_S)
    lines = [line.split(" ") for line in trace.read_text().splitlines()]
    trace.unlink()
    names = sorted({name for _, name in lines})
    return {n: sorted({scope for scope, name in lines if name == n}) for n in names}


def take_in(history: History, world: World) -> None:
    """Add all that has happened since."""
    more = world.history()
    history.writes += more.writes
    history.seen += more.seen
    history.answers += more.answers


def judged(verdict: Verdict, history: History) -> Verdict:
    """`verdict`, with what the history says."""
    answers = history.answers
    verdict.requests = len(answers)
    verdict.lost = lost(history)
    verdict.retried = sum(bool(a.error) for a in answers) - verdict.lost
    verdict.silence_s = round(longest_silence_s(answers), 3)
    verdict.violations += [f"{v.rule}: {v.what}" for v in check(history, WINDOWS)]
    return verdict


async def _prepare(world: World, resize: Resize) -> None:
    """The joiner will come from where it is to come from."""
    if resize is not Resize.UP:
        return
    parked = [s.pid for s in await world.slots() if s.state is SlotState.PARKED]
    for pid in parked:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _resize(world: World, scenario: Scenario) -> bool:
    """Ask for the width, with the fault on its way; returns whether it happened."""
    at_random = isinstance(scenario.fault, AtRandom)
    fault = asyncio.create_task(inject(world, scenario))
    if not at_random:
        await fault
    request_id = await world.scale(scenario.ranks)
    fired = await fault
    await _answered(world, request_id)
    return fired and await _met(world, scenario)


async def _met(world: World, scenario: Scenario) -> bool:
    """Whether the fault has happened: some failpoints are passed only after the operation."""
    until_s = time.monotonic() + _LINGER_S
    while not happened(world, scenario) and time.monotonic() < until_s:
        await asyncio.sleep(_POLL_S)
    return happened(world, scenario)


async def _answered(world: World, request_id: str) -> OutcomeStatus | None:
    """What became of a request; None if nobody has said so yet."""
    deadline_s = time.monotonic() + _REACH_S
    while time.monotonic() < deadline_s:
        with suppress(StoreError):
            outcome = (await world.status()).outcome
            if outcome is not None and outcome.request_id == request_id:
                return outcome.status
        await asyncio.sleep(_POLL_S)
    return None


async def at_width(world: World, ranks: int) -> None:
    """The deployment is whole, with `ranks` ranks; it is asked for them if need be. Raises Hang."""
    deadline_s = time.monotonic() + HANG_S
    while True:
        status = await _at_rest(world, deadline_s)
        if status.width == ranks:
            return
        request_id = await world.scale(ranks)
        await _answered(world, request_id)


async def settled(world: World) -> Status:
    """The deployment is at rest, at whatever width. Raises Hang."""
    return await _at_rest(world, time.monotonic() + HANG_S)


async def _at_rest(world: World, deadline_s: float) -> Status:
    try:
        return await at_rest(world.status, _unrest, deadline_s=deadline_s, poll_s=_POLL_S)
    except NotAtRest as exc:
        raise Hang(f"after {HANG_S:g} s: {exc}") from exc


def _unrest(status: Status) -> str:
    """Every shell is where it belongs, too."""
    if (why := unrest(status)) or status.in_force is None:
        return why
    states = {w: m.state for w, m in status.members.items()}
    members = status.in_force.worker_ids
    wanted = {
        f"slot{k}": MemberState.SERVING if f"slot{k}" in members else MemberState.STANDBY
        for k in range(WIDE)
    }
    return "" if states == wanted else f"shells are {states}"


async def stream_ends(world: World) -> None:
    """A stream that began after this ends well: serving goes on. Raises Hang."""
    since_s = time.monotonic()
    while time.monotonic() - since_s < HANG_S / 2:
        if any(r.started_s > since_s and not r.error for r in world.load.results):
            return
        await asyncio.sleep(_POLL_S)
    raise Hang("no stream ends: serving stands still")
