"""How growth over cycles is judged."""

from __future__ import annotations

import pytest

from dynamo_elastic.testing.cycles import Footprint, is_ours, lasting, slope


def test_slope_is_that_of_the_line_per_hundred_cycles() -> None:
    assert slope([5.0]) == 0
    assert slope([7, 7, 7, 7]) == 0
    assert slope([10 + 0.5 * i for i in range(40)]) == pytest.approx(50)
    assert slope([10, 12, 10, 12, 10, 12, 10, 12, 10]) == pytest.approx(0)


def test_a_process_that_was_replaced_does_not_last() -> None:
    here = Footprint(1, 2, 3)
    samples = [{"agent:1": here, "slot0:2": here}, {"agent:1": here, "slot0:3": here}]
    assert lasting(samples) == ["agent:1"]


def test_dynamo_and_etcd_are_not_ours() -> None:
    assert is_ours("slot0:17")
    assert not any(is_ours(f"{name}:1") for name in ("frontend", "etcd", "this"))
