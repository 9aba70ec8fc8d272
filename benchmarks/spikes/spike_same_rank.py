"""Question 2: the same rank leaves and joins again at once, over and over, without a sleep.

NIXL EP names its agent after the rank, so every return re-uses a name that the peer just forgot.
"""

from __future__ import annotations

import time
from statistics import median

import ep_group
from common import Report, run_spike
from ep_group import EpPeer
from rank_process import kill_all

CYCLES = 20
PROCESSES = 3


def pair() -> tuple[EpPeer, EpPeer]:
    """Two ranks that serve together."""
    peer, leaver = ep_group.start([0, 1])
    ep_group.capture_alone([peer, leaver])
    join(peer, leaver)
    return peer, leaver


def join(peer: EpPeer, joiner: EpPeer) -> float:
    """Connect, unmask and prove one joint step; returns the seconds."""
    begin = time.perf_counter()
    ep_group.connect([joiner], [peer], timeout_s=20)
    ep_group.unmask([peer, joiner])
    seconds = time.perf_counter() - begin
    ep_group.joint([peer, joiner], seed=int(begin) % 97)
    return seconds


def same_buffer(report: Report) -> None:
    """The leaver keeps its Buffer: only disconnect and connect."""
    peer, leaver = pair()
    leave_s, join_s = [], []
    for _ in range(CYCLES):
        begin = time.perf_counter()
        ep_group.disconnect([peer], [leaver])
        leave_s.append(time.perf_counter() - begin)
        join_s.append(join(peer, leaver))
    report.metric("same_buffer_leave_s", median(leave_s))
    report.metric("same_buffer_join_s", median(join_s))
    report.metric("same_buffer_join_worst_s", max(join_s))
    for rank in (peer, leaver):
        rank.kill()


def fresh_buffer(report: Report) -> None:
    """The leaver makes a new Buffer under the same agent name, as after a restore."""
    peer, leaver = pair()
    leave_s, make_s, join_s = [], [], []
    for _ in range(CYCLES):
        begin = time.perf_counter()
        ep_group.disconnect([peer], [leaver])
        leaver.call("drop")
        leave_s.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        leaver.call("fresh", rank=1)
        leaver.call("rebind")
        make_s.append(time.perf_counter() - begin)
        join_s.append(join(peer, leaver))
    report.metric("fresh_buffer_leave_s", median(leave_s))
    report.metric("fresh_buffer_make_s", median(make_s))
    report.metric("fresh_buffer_join_s", median(join_s))
    report.metric("fresh_buffer_join_worst_s", max(join_s))
    report.note("fresh_buffer_cycles", CYCLES)
    for rank in (peer, leaver):
        rank.kill()


def other_process(report: Report) -> None:
    """The rank dies without a goodbye and another warm process takes its number at once."""
    peer, leaver = pair()
    spares = [EpPeer(1, 1).wait_ready() for _ in range(PROCESSES)]
    for spare in spares:
        spare.call("open", rank=1, max_ranks=4, timeout_s=90)
        ep_group.capture_alone([spare])
    seconds = []
    for spare in spares:
        leaver.kill()
        begin = time.perf_counter()
        peer.call("disconnect", ranks=[1])
        join(peer, spare)
        seconds.append(time.perf_counter() - begin)
        leaver = spare
    report.metric("killed_rank_replaced_s", median(seconds))
    report.note("killed_rank_replaced", seconds)
    for rank in (peer, leaver):
        rank.kill()


def body(report: Report) -> None:
    """Three ways of coming back."""
    report.metric("cycles", CYCLES)
    report.attempt("same_buffer", same_buffer)
    report.attempt("fresh_buffer", fresh_buffer)
    report.attempt("other_process", other_process)


if __name__ == "__main__":
    run_spike("same_rank", body, kill_all)
