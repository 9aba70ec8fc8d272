"""Simulated deployments, each from its seed: whatever goes wrong, every invariant holds.

`benchmarks/protocol_sim.py` plays many more of the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest

from dynamo_elastic.coordinator.store import Guard, Leadership
from dynamo_elastic.failpoint_table import FAILPOINTS, Actor
from dynamo_elastic.testing.simulation import COORDINATOR, Schedule, Verdict, play
from dynamo_elastic.testing.simulation_engine import Fabric
from dynamo_elastic.testing.simulation_faults import Mishap
from dynamo_elastic.testing.simulation_schedules import DEAF_FROM, scrambled, systematic
from dynamo_elastic.worker.participant import Participant

pytestmark = pytest.mark.timeout(120)

SEEDS = 30
TRIES = 10
"""Schedules of a place that are played until a fault has hit there."""
ORDER = (COORDINATOR, "slot1", "slot3", "slot0", "slot2")
"""A rank that stays, and one that joins and leaves: these come by nearly everywhere."""


def deaf(widths: tuple[int, ...], *, slots_per_rank: int = 4) -> Schedule:
    """slot0 does not hear of the decision for the last of `widths`, for longer than a step."""
    nth = DEAF_FROM * len(widths)
    fault = ("slot0", "engine.decide", Mishap.STUCK, nth)
    return Schedule(7, widths, (fault,), slots_per_rank)


def test_nothing_goes_wrong_without_faults() -> None:
    verdict = play(Schedule(1, (4, 3, 2), ()))
    assert (verdict.violations, verdict.met) == ((), ())
    assert verdict.committed == (("boot", 2), ("test", 4), ("test", 3), ("test", 2), ("test", 3))


@cache
def by_place() -> dict[str, list[Schedule]]:
    """Systematic schedules of each place, those first that are most likely to come by there; the
    mishap is another from place to place."""
    found: dict[str, list[Schedule]] = {}
    for schedule in systematic():
        found.setdefault(schedule.faults[-1][1], []).append(schedule)
    for number, schedules in enumerate(found.values()):
        first = list(Mishap)[number % len(Mishap)]
        schedules.sort(key=partial(_rank, first))
    return found


def _rank(first: Mishap, schedule: Schedule) -> tuple[Any, ...]:
    process, _, mishap, nth = schedule.faults[-1]
    unlikely = (nth, -len(schedule.widths), ORDER.index(process))
    return mishap != first, *unlikely, -schedule.slots_per_rank


def test_the_systematic_schedules_know_every_failpoint_of_coordinator_and_shell() -> None:
    known = {f.name for f in FAILPOINTS if f.actor in (Actor.COORDINATOR, Actor.SHELL)}
    assert known - by_place().keys() == set()


@pytest.mark.parametrize("family", ["coordinator", "scale", "worker", "registration", "rest"])
def test_one_fault_at_every_place_and_it_really_hits(family: str) -> None:
    """A place that is new is played as well; one that no operation comes by is named."""
    families = ("coordinator", "scale", "worker", "registration")
    places = [
        place
        for place in by_place()
        if (place.partition(".")[0] if place.startswith(families) else "rest") == family
    ]
    verdicts = {place: list(until_hit(place)) for place in places}
    assert [v for tried in verdicts.values() for v in tried if v.violations] == []
    assert [p for p, tried in verdicts.items() if not tried or p not in tried[-1].met] == []


def until_hit(place: str) -> Iterator[Verdict]:
    """Verdicts of schedules of `place`, up to the first in which a fault has hit there."""
    for schedule in by_place()[place][:TRIES]:
        verdict = play(schedule)
        yield verdict
        if place in verdict.met:
            return


def test_several_faults_and_targets() -> None:
    verdicts = [play(scrambled(seed)) for seed in range(SEEDS)]
    assert [v for v in verdicts if v.violations] == []
    assert sum(len(v.met) for v in verdicts) > SEEDS / 2


def test_a_schedule_plays_the_same_again() -> None:
    verdicts = [play(scrambled(3)) for _ in range(2)]
    assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("widths", [(4,), (4, 2), (4, 3)])
def test_a_decision_that_a_rank_misses_is_superseded_without_it(widths: tuple[int, ...]) -> None:
    verdict = play(deaf(widths))
    assert verdict.violations == ()
    decided = verdict.committed[len(widths) : len(widths) + 2]
    kept = min(verdict.committed[len(widths) - 1][1], widths[-1]) - 1
    assert decided == (("test", widths[-1]), ("superseding", max(kept, 1)))


def test_a_rank_that_missed_a_decision_stays_if_it_can_not_be_spared() -> None:
    """Its experts are nowhere else: the decision is undone, and the same ranks serve on."""
    verdict = play(deaf((4,), slots_per_rank=2))
    assert verdict.violations == ()
    assert verdict.committed[1:3] == (("test", 4), ("superseding", 2))
    assert "boot" not in [source for source, _ in verdict.committed[1:]]


REGRESSIONS = {
    "a rank whose THAW failed stayed frozen": Schedule(
        0, (4,), (("slot0", "worker.thaw.begin", Mishap.ERROR, 0),)
    ),
    "a rebalance after an abort used an epoch again": Schedule(
        0,
        (4, 3, 4),
        (
            ("slot0", "engine.push_experts", Mishap.STUCK, 0),
            ("slot1", "engine.push_experts", Mishap.STUCK, 0),
            ("slot3", "worker.restore.begin", Mishap.STUCK, 1),
        ),
        2,
    ),
}


@pytest.mark.parametrize("schedule", REGRESSIONS.values(), ids=REGRESSIONS)
def test_regressions(schedule: Schedule) -> None:
    assert play(schedule).violations == ()


async def nothing(*_: Any, **__: Any) -> Any:
    return {}


def found(schedule: Schedule) -> str:
    verdict: Verdict = play(schedule)
    return "; ".join(verdict.violations)


class TestTheInvariantsCanFail:
    """Each guard, taken away, is seen to be missing."""

    def test_the_fencing_token(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Leadership, "guard", lambda _: Guard("/nothing", 0))
        assert "without a fencing token" in found(Schedule(1, (4,), ()))

    def test_the_switch_in_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Fabric, "_can_switch", lambda *_: True)
        assert "is stepped in while" in found(deaf((4,)))

    def test_the_thaw(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Participant, "thaw", nothing)
        assert "is frozen" in found(Schedule(1, (4,), ()))

    def test_the_admission(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def freeze(self: Participant, _: Any) -> dict[str, Any]:
            await self.suspend()
            return {}

        monkeypatch.setattr(Participant, "freeze", freeze)
        assert "lost its admission" in found(Schedule(1, (4,), ()))

    def test_the_end_of_engines_without_a_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Participant, "_release", Participant.suspend)
        assert "lives without a rank" in found(Schedule(1, (4, 2), ()))
