"""Percentiles of the load test."""

from __future__ import annotations

import pytest
from control_plane import percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.99, 3.0),
        ([float(n) for n in range(100, 0, -1)], 0.99, 99.0),
        ([float(n) for n in range(100)], 0.5, 49.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_a_percentile_is_one_of_the_values(
    values: list[float], share: float, expected: float
) -> None:
    assert percentile(values, share) == expected
