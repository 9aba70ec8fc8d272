"""Which width becomes of a proposal: always one that can be had, and one that can stay."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.coordinator.records import CapacityRecord
from dynamo_elastic.dynamo.widths import nearest_width
from dynamo_elastic.types import WorkerId

EVEN = (2, 4, 6, 8)


def capacity(
    width: int, legal: tuple[int, ...] = EVEN, attainable: int = 8, **withheld: str
) -> CapacityRecord:
    suspects = {WorkerId(w): why for w, why in withheld.items()}
    return CapacityRecord(width, legal, attainable, suspects)


@pytest.mark.parametrize(
    ("current", "wanted", "attainable", "fits", "width"),
    [
        (4, 4, 8, True, 4),
        (4, 6, 8, True, 6),
        (2, 3, 8, True, 4),  # a step up is finished
        (2, 3, 3, True, 2),  # or not made, without the GPUs for it
        (2, 8, 7, True, 6),
        (2, 9, 9, True, 8),
        (8, 9, 9, True, 8),
        (4, 3, 8, True, 2),  # a step down is finished, if the load fits
        (4, 3, 8, False, 4),
        (8, 5, 8, False, 6),  # it stops before what was asked for, if it can
        (8, 2, 8, False, 2),  # the planner has looked at that one itself
        (2, 1, 8, True, 2),
        (4, 2, 1, True, 2),  # to go down needs no GPU
        (3, 4, 8, True, 4),  # from an illegal width, that a loss has left
        (3, 2, 8, True, 2),
    ],
)
def test_table(current: int, wanted: int, attainable: int, fits: bool, width: int) -> None:
    found, why = nearest_width(
        current, wanted, capacity(current, attainable=attainable), lambda n: fits
    )
    assert found == width
    assert bool(why) is (found != wanted)


def test_reasons_name_what_is_missing() -> None:
    held = capacity(2, legal=(2, 3, 4), attainable=3, slot3="CHECK failed twice")
    assert nearest_width(2, 4, held, lambda n: True) == (
        3,
        "4 -> 3: GPUs for 3 ranks; slot3 is in quarantine: CHECK failed twice",
    )
    _, why = nearest_width(4, 3, capacity(4), lambda n: False)
    assert why == "3 -> 4: legal widths are 2, 4, 6, 8, and the load does not fit 2 ranks"


widths = st.integers(1, 12)


@given(
    legal=st.sets(widths).map(lambda s: tuple(sorted(s))),
    current=widths,
    wanted=widths,
    attainable=widths,
    fits=st.booleans(),
)
def test_always_a_width_that_can_be_had_on_the_proposals_side(
    legal: tuple[int, ...], current: int, wanted: int, attainable: int, fits: bool
) -> None:
    now = capacity(current, legal, attainable)
    width, _ = nearest_width(current, wanted, now, lambda n: fits)
    assert width == current or (width in legal and (width < current or width <= attainable))
    assert (width - current) * (wanted - current) >= 0


@given(
    legal=st.sets(widths, min_size=1).map(lambda s: tuple(sorted(s))),
    load=st.integers(0, 1200),
    start=widths,
    up=st.integers(10, 100),
    down_share=st.floats(0, 0.9),
)
def test_the_planners_steps_settle_under_a_steady_load(
    legal: tuple[int, ...], load: int, start: int, up: int, down_share: float
) -> None:
    """Dynamo's own rule, a rank at a time, with us behind it: it comes to rest."""
    current, seen = start, [start]
    for _ in range(40):
        each = load / current
        wanted = current
        if each >= up:
            wanted = current + 1
        elif each <= up * down_share and current > 1:
            wanted = current - 1
            wanted = current if wanted and each * current / wanted >= up else wanted
        current, _ = nearest_width(
            current, wanted, capacity(current, legal, 12), lambda n: load / n < up
        )
        seen.append(current)
    turns = [b - a for a, b in pairwise(seen) if a != b]
    assert all((a > 0) == (b > 0) for a, b in pairwise(turns)), seen
    assert seen[-1] == seen[-2]
