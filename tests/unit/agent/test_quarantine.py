"""Quarantine: an image that failed in a row is left alone for a while; a drain is a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_elastic.agent.drain import Drain
from dynamo_elastic.agent.quarantine import FAILURES, Quarantine
from dynamo_elastic.errors import EngineError


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def quarantine(now: list[float]) -> Quarantine:
    return Quarantine(60.0, lambda: now[0])


def test_one_failure_is_not_enough(quarantine: Quarantine) -> None:
    assert FAILURES == 2
    quarantine.failed("a", "no")
    assert quarantine.reason("a") == ""
    assert quarantine.reasons() == {}


def test_two_in_a_row_until_the_cool_down_is_over(quarantine: Quarantine, now: list[float]) -> None:
    quarantine.failed("a", "first")
    quarantine.failed("b", "other")
    quarantine.failed("a", "second")
    assert quarantine.reason("a") == "in quarantine for 60 s after 2 failures: second"
    assert list(quarantine.reasons()) == ["a"]
    now[0] += 59
    assert quarantine.reason("a") != ""
    now[0] += 1
    assert quarantine.reason("a") == ""
    quarantine.failed("a", "third")
    assert "after 3 failures: third" in quarantine.reason("a")


def test_success_forgets(quarantine: Quarantine) -> None:
    quarantine.failed("a", "first")
    quarantine.worked("a")
    quarantine.failed("a", "second")
    assert quarantine.reason("a") == ""
    quarantine.worked("never seen")


def test_drain_outlives_its_object(tmp_path: Path) -> None:
    Drain(tmp_path).check()
    Drain(tmp_path).begin("driver upgrade")
    assert Drain(tmp_path).reason == "driver upgrade"
    with pytest.raises(EngineError, match="driver upgrade"):
        Drain(tmp_path).check()
    Drain(tmp_path).begin("")
    assert Drain(tmp_path).reason == "no reason given"
    Drain(tmp_path).end()
    Drain(tmp_path).end()
    Drain(tmp_path).check()
