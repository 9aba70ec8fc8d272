"""The ladder: best tier first, a reason for each that is not used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.ladder import Fall, Obstacle, Why, above, choose

TIERS = st.sampled_from(list(Tier))
OBSTACLES = st.builds(Obstacle, st.sampled_from(list(Why)), st.text())


def test_host_with_nothing_parked() -> None:
    ladder = choose(list(Tier), {Tier.PARKED: Obstacle(Why.ABSENT, "none is parked")})
    assert ladder.rungs == (Tier.IMAGE, Tier.CACHED, Tier.COLD)
    assert [str(fall) for fall in ladder.falls] == ["parked: none is parked"]


@given(st.lists(TIERS, unique=True), st.dictionaries(TIERS, OBSTACLES))
def test_every_wanted_tier_is_a_rung_or_has_a_reason(
    wanted: list[Tier], obstacles: dict[Tier, Obstacle]
) -> None:
    ladder = choose(wanted, obstacles)
    assert list(ladder.rungs) == [t for t in Tier if t in wanted and t not in obstacles]
    assert set(ladder.falls) == {Fall(t, obstacles[t]) for t in wanted if t in obstacles}


def test_only_better_tiers_were_fallen_through() -> None:
    falls = [Fall(tier, Obstacle(Why.ABSENT, "none")) for tier in (Tier.PARKED, Tier.CACHED)]
    assert above(falls, Tier.COLD) == tuple(falls)
    assert above(falls, Tier.IMAGE) == (falls[0],)
    assert above(falls, Tier.PARKED) == ()
