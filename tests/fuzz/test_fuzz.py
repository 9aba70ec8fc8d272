"""Whatever is handed to us from outside: answered, or refused by a typed error; soon, and whole."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynamo_elastic.testing.fuzz import TARGETS, seeds

SEEDS = seeds()
DEADLINE = timedelta(seconds=10)
"""Of one input: a hang, not a slow machine."""
BUDGET = {"agent_call": 25, "engine_call": 25, "http": 8, "control": 40, "archive": 40}
"""Examples, where a server is started for each; the others take a millisecond."""


@st.composite
def damaged(draw: st.DrawFn, target: str) -> bytes:
    """Bytes of any kind, or something well-formed with a few changes."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(SEEDS[target])))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        if draw(st.booleans()):
            data[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
        else:
            words = [b"null", b"-1", b"1e999", b"NaN", b"[[[[", b'"', b"{}", b"\xff", b"0" * 40]
            data[at:at] = draw(st.sampled_from(words))
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_from_outside_gets_through(target: str) -> None:
    @settings(
        max_examples=BUDGET.get(target, 150),
        deadline=DEADLINE,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(target))
    def attack(data: bytes) -> None:
        TARGETS[target](data)

    for seed in SEEDS[target]:
        attack = example(seed)(attack)
    attack()
