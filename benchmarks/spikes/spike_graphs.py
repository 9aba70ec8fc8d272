"""Question 7: graphs that an engine captures with `torch.cuda.CUDAGraph()` stay patchable.

50 graphs of 30 layers hold 3,000 NIXL EP nodes, copy and fill nodes on Buffer memory, and engine
kernels that write into it (a zero-copy combine). They are rebound to a Buffer at other addresses,
after a restore onto the same and onto the other GPU, and compared with capturing them again.
"""

from __future__ import annotations

import time

import checkpoints
import ep_group
from common import GpuReadings, Report, SpikeError, run_spike
from ep_group import EpPeer
from rank_process import kill_all

GRAPHS, LAYERS = 50, 30


def without_hook(report: Report) -> None:
    """What upstream's capture leaves: no template, so nothing to patch; and what it costs."""
    rank = EpPeer(0, 0).wait_ready()
    rank.call("open", rank=0, max_ranks=4, timeout_s=90)
    rank.call("route", world=[0])
    found = rank.call("capture_only", graphs=GRAPHS, layers=LAYERS, extras=True, timeout_s=150)
    for key, value in found.items():
        report.metric(f"without_hook_{key}", value)
    answer = rank.ask("record", extras=True)
    report.metric("template_without_hook", "error" not in answer)
    report.note("without_hook", answer.get("error", answer.get("value")))
    rank.kill()


def captured(report: Report, rank: EpPeer) -> None:
    """The big set of graphs, and what keeping them patchable costs."""
    rank.call("open", rank=1, max_ranks=4, timeout_s=90)
    found = ep_group.capture_alone([rank], graphs=GRAPHS, layers=LAYERS, extras=True)[0]
    for key, value in found.items():
        report.metric(f"captured_{key}", value)
    report.note("first_replay", rank.call("replay_each", active=[1]))
    report.note("extra_nodes_before", rank.call("tail_check"))


def moved(report: Report, rank: EpPeer, name: str, swap: bool) -> None:
    """Park, restore (perhaps onto the other GPU), new Buffer elsewhere, rebind, replay all."""
    rank.call("drop")
    timings = checkpoints.cuda_out(rank.pid)
    timings |= checkpoints.cuda_in(rank.pid, checkpoints.swapped(0, 1) if swap else None)
    rank.call("occupy")
    begin = time.perf_counter()
    rank.call("fresh", rank=1)
    timings["fresh_s"] = time.perf_counter() - begin
    found = rank.call("rebind", extras=True)
    report.note(name, {**timings, **found})
    for key, value in {**timings, **found}.items():
        report.metric(f"{name}_{key}", value)
    replayed = rank.call("replay_each", active=[1])
    written = rank.call("tail_check")
    report.note(f"{name}_replayed", {**replayed, **written})
    report.metric(f"{name}_worst_error", replayed["worst_error"])
    report.metric(f"{name}_bad_tokens", replayed["bad_tokens"])
    if replayed["bad_tokens"] or not all(written.values()):
        raise SpikeError(f"{name}: {replayed} {written}")


def with_peer(report: Report, rank: EpPeer, peer: EpPeer, name: str) -> None:
    """The rebound graphs in a joint step with a rank on the other GPU."""
    ep_group.connect([rank], [peer])
    everyone = [peer, rank]
    try:
        ep_group.unmask(everyone)
        report.note(f"{name}_phased", ep_group.phased(everyone, strict=False))
        report.note(f"{name}_joint", ep_group.joint(everyone))
        ep_group.assert_nvlink(report, GpuReadings(), everyone, name, steps=20)
    finally:
        ep_group.disconnect([peer], [rank])


def recapture(report: Report, rank: EpPeer) -> None:
    """The alternative to rebinding."""
    rank.call("forget_graphs")
    found = rank.call("capture", graphs=GRAPHS, layers=LAYERS, extras=True, timeout_s=150)
    report.metric("recapture_s", found["capture_s"])


def body(report: Report) -> None:
    """Same GPU, joint, other GPU, joint, recapture."""
    report.attempt("without_hook", without_hook)
    peer, rank = EpPeer(0, 0).wait_ready(), EpPeer(1, 1).wait_ready()
    peer.call("open", rank=0, max_ranks=4, timeout_s=90)
    # The peer's graph has the same number of layers, so that the joint replays pair up.
    ep_group.capture_alone([peer], graphs=1, layers=LAYERS)
    captured(report, rank)
    if report.attempt("same_gpu", moved, rank, "same_gpu", False):
        report.attempt("same_gpu_joint", with_peer, rank, peer, "same_gpu")
    report.attempt("recapture", recapture, rank)
    rank.kill()
    rank = EpPeer(1, 0).wait_ready()  # starts on the peer's GPU and is moved to the other one
    captured(report, rank)
    if report.attempt("other_gpu", moved, rank, "other_gpu", True):
        rank.gpu = 1
        report.attempt("other_gpu_joint", with_peer, rank, peer, "other_gpu")
    report.note("logs", [peer.log_tail(600), rank.log_tail(600)])


if __name__ == "__main__":
    run_spike("graphs", body, kill_all)
