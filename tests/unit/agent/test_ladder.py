"""The ladder: best tier first, a reason for each that is not used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.ladder import choose, fell

TIERS = st.sampled_from(list(Tier))


def test_host_without_a_gpu() -> None:
    ladder = choose(list(Tier), {Tier.PARKED: "no GPU"})
    assert ladder.rungs == (Tier.IMAGE, Tier.COLD)
    assert ladder.skipped == ("parked: no GPU",)


@given(st.lists(TIERS, unique=True), st.dictionaries(TIERS, st.just("why")))
def test_every_wanted_tier_is_a_rung_or_has_a_reason(
    wanted: list[Tier], obstacles: dict[Tier, str]
) -> None:
    ladder = choose(wanted, obstacles)
    assert list(ladder.rungs) == [t for t in Tier if t in wanted and t not in obstacles]
    assert set(ladder.skipped) == {fell(t, "why") for t in wanted if t in obstacles}
