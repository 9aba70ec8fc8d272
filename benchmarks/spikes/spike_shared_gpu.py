"""Question 16: two processes on one GPU, one of them restored by the driver: who waits for whom?

One spins in a kernel; the other's small kernels are timed meanwhile. Processes that share a GPU
take turns of about 2 ms; asked is whether that still holds after a restore. Needs one GPU.
"""

from __future__ import annotations

import time

import checkpoints
from common import Report, run_spike
from rank_process import Rank, kill_all

SPIN_S = 1.2
_AHEAD_S = 0.15
_TURN_S = 0.1
"""Much longer than any turn, much shorter than the spin."""


def against(report: Report, name: str, spinner: Rank, other: Rank, stream: str = "first") -> bool:
    """Whether `other` gets its turn while `spinner` spins."""
    spinner.call("spin", seconds=SPIN_S, stream=stream)
    return _turn(report, name, spinner, other)


def _turn(report: Report, name: str, spinner: Rank, other: Rank) -> bool:
    time.sleep(_AHEAD_S)
    found = other.call("tick", number=3)
    spun_s = spinner.call("wait")
    report.note(name, {"ticks_ms": found, "spun_s": round(spun_s, 3)})
    report.metric(f"{name}_worst_ms", max(found))
    return max(found) < 1e3 * _TURN_S


def restored(rank: Rank) -> None:
    """Off the GPU and back."""
    checkpoints.cuda_out(rank.pid)
    checkpoints.cuda_in(rank.pid)


def body(report: Report) -> None:
    """Both ways, before and after; then what might give a restored process its turns back."""
    first, second = (Rank("shared_rank.py", name, 0).wait_ready() for name in ("first", "second"))
    turns = {"never_restored": against(report, "never_restored", first, second)}
    restored(second)
    turns["spins_beside_restored"] = against(report, "spins_beside_restored", first, second)
    turns["restored_spins"] = against(report, "restored_spins", second, first)
    for name, priority in (("stream", 0), ("urgent", -5)):
        second.call("stream", name=name, priority=priority)
        turns[f"new_{name}"] = against(report, f"new_{name}", second, first, name)
    born = Rank("shared_rank.py", "born", 0).wait_ready()
    turns["born_after"] = against(report, "born_after", second, born)
    second.call("spin", seconds=0)
    second.call("spin_in_new_context", seconds=SPIN_S)
    time.sleep(_AHEAD_S)
    found = first.call("tick", number=3)
    report.note("new_context", {"ticks_ms": found})
    turns["new_context"] = max(found) < 1e3 * _TURN_S
    time.sleep(SPIN_S)
    restored(first)
    turns["both_restored"] = against(report, "both_restored", first, second)
    for name, took_turns in turns.items():
        report.metric(f"{name}_turns", took_turns)


if __name__ == "__main__":
    run_spike("shared_gpu", body, kill_all)
