"""Simulated deployments, each from its seed: whatever goes wrong, every invariant holds.

`benchmarks/protocol_sim.py` plays many more of the same.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from dynamo_elastic.coordinator.store import Guard, Leadership
from dynamo_elastic.testing.simulation import Schedule, Verdict, play
from dynamo_elastic.testing.simulation_engine import Fabric
from dynamo_elastic.testing.simulation_faults import Mishap
from dynamo_elastic.testing.simulation_schedules import scrambled, systematic
from dynamo_elastic.worker.participant import Participant

pytestmark = pytest.mark.timeout(120)

EVERY = 199
SEEDS = 50
DEAF_FROM = 2
"""Calls of decide() that a rank of the boot has heard; it misses those that follow."""


def deaf(widths: tuple[int, ...], *, slots_per_rank: int = 4) -> Schedule:
    """slot0 does not hear of the decision for the last of `widths`, for longer than a step."""
    nth = DEAF_FROM * len(widths)
    fault = ("slot0", "engine.decide", Mishap.STUCK, nth)
    return Schedule(7, widths, (fault,), slots_per_rank)


def test_nothing_goes_wrong_without_faults() -> None:
    verdict = play(Schedule(1, (4, 3, 2), ()))
    assert (verdict.violations, verdict.injected) == ((), 0)
    assert verdict.committed == (("boot", 2), ("test", 4), ("test", 3), ("test", 2), ("test", 3))


def test_one_fault_at_every_kind_of_place() -> None:
    verdicts = [play(s) for s in islice(systematic(), 0, None, EVERY)]
    assert [v for v in verdicts if v.violations] == []
    assert sum(v.injected for v in verdicts) > len(verdicts) / 10


def test_several_faults_and_targets() -> None:
    verdicts = [play(scrambled(seed)) for seed in range(SEEDS)]
    assert [v for v in verdicts if v.violations] == []
    assert sum(v.injected for v in verdicts) > SEEDS / 2


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
