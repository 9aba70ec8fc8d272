"""What the soak counts as growth: that of processes that are warm, whatever they are called."""

from __future__ import annotations

from typing import Any

import pytest
from protocol_soak import WARM_RESIZES, growth, growth_of, lives

MB = 1_000_000


def part(held: dict[int, dict[str, int]]) -> dict[str, Any]:
    """A slice: resizes so far -> process -> its resident bytes."""
    return {
        "rests": [
            {
                "resizes": resizes,
                "etcd_keys": 20,
                "processes": {
                    name: {"rss_bytes": size, "fds": 5, "threads": 2}
                    for name, size in processes.items()
                },
            }
            for resizes, processes in held.items()
        ]
    }


def growing(until: int, *, warm_up_mb: int, then_mb: int, name: str = "agent:7") -> dict[str, Any]:
    """`warm_up_mb` until it is warm, and `then_mb` in every 100 resizes after that."""
    return part(
        {
            k: {
                name: MB * warm_up_mb * min(k, WARM_RESIZES) // WARM_RESIZES
                + MB * then_mb * max(0, k - WARM_RESIZES) // 100
            }
            for k in range(0, until, 5)
        }
    )


def test_what_a_process_takes_to_get_warm_is_no_growth() -> None:
    slices = [growing(400, warm_up_mb=50, then_mb=0)]
    assert growth(slices, "rss_bytes") == {"agent": pytest.approx(0.0)}
    assert growth_of(slices)["rss_level_bytes"] == 50 * MB


def test_what_it_takes_later_is() -> None:
    slices = [growing(400, warm_up_mb=50, then_mb=2), growing(400, warm_up_mb=50, then_mb=4)]
    assert growth(slices, "rss_bytes") == {"agent": pytest.approx(3 * MB, rel=0.01)}
    assert growth_of(slices)["rss_growth"] == pytest.approx(3 / 58, rel=0.1)


def test_lives_that_end_before_tell_nothing() -> None:
    assert growth_of([growing(WARM_RESIZES + 20, warm_up_mb=50, then_mb=9)]) == {}


def test_a_process_that_is_called_otherwise_now_is_as_old_as_before() -> None:
    found = lives([part({0: {"engine1:9": 1}, 60: {"engine1_idle:9": 2}})], "rss_bytes")
    assert found == {"engine1": [[(0, 1)]], "engine1_idle": [[(60, 2)]]}


def test_processes_that_run_no_code_of_ours_do_not_count() -> None:
    assert growth_of([growing(400, warm_up_mb=1, then_mb=9, name="etcd:3")]) == {}
