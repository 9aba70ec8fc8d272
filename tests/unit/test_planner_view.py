"""Reading a planner's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_elastic.testing.planner_view import PlannerLog


def line(action: str, ranks: int, reason: str) -> str:
    return (
        f"\x1b[2m2026-11-30T08:17:54Z\x1b[0m INFO base: [summary] {action} | current: prefill=0 "
        f"decode={ranks} | recommended: prefill=- decode=- (delta: +0 / +0) | "
        f"load_reason={reason} throughput_reason=n/a | est_ttft=0.0ms\n"
    )


@pytest.mark.parametrize(
    ("lines", "stable"),
    [
        ([line("HOLD", 4, "no_change")], True),
        ([line("HOLD", 3, "no_change")], False),
        ([line("SCALE_UP", 4, "scale_up")], False),
        ([line("HOLD", 4, "scaling_in_progress")], False),
        ([line("HOLD", 4, "no_change"), line("HOLD", 4, "worker_count_mismatch")], False),
        ([line("HOLD", 4, "scaling_in_progress"), line("HOLD", 4, "gpu_budget_guard_hold")], True),
        ([], False),
    ],
)
def test_the_newest_tick_decides(tmp_path: Path, lines: list[str], stable: bool) -> None:
    path = tmp_path / "planner.log"
    path.write_text(line("HOLD", 4, "no_change"))
    log = PlannerLog(path)
    log.skip()
    with path.open("a") as out:
        out.writelines(lines)
    assert log.stable_at(4) is stable
