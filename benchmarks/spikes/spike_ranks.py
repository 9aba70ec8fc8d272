"""Question 6: three and four ranks, all orders of joining, masks after each step, stopped peers.

On two GPUs the ranks share them (rank i on GPU i mod 2); on four each has its own. Where ranks that
share a GPU cannot wait for each other inside kernels, the orders run with steps in four turns, and
the stopped peer is one of two.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from statistics import median

import ep_group
from common import GpuReadings, Report, SpikeError, run_spike
from ep_group import EpPeer
from rank_process import call_all, kill_all, value_of

STOP_TIMEOUTS_MS = (100, 500, 2000)


def renew(peers: list[EpPeer], timeout_ms: int = 4000) -> None:
    """Everybody back to a fresh, unconnected Buffer."""
    call_all(peers, "drop")
    posted = [(peer, peer.send("fresh", rank=peer.number, timeout_ms=timeout_ms)) for peer in peers]
    for peer, index in posted:
        value_of(peer, "fresh", peer.receive(index))
    for peer in peers:
        peer.call("route", world=[peer.number])
    call_all(peers, "rebind")


def join_all(order: list[EpPeer], op: str) -> list[float]:
    """The ranks of `order` join one by one; after each, a joint step and everybody's masks."""
    seconds = []
    for size in range(2, len(order) + 1):
        present, newcomer = order[: size - 1], order[size - 1]
        begin = time.perf_counter()
        ep_group.connect([newcomer], present)
        seconds.append(time.perf_counter() - begin)
        if size > 2:
            ep_group.joint(present, op=op)  # still without the newcomer
        ep_group.unmask(order[:size])
        ep_group.joint(order[:size], op=op, seed=size)
    return seconds


def every_order(report: Report, peers: list[EpPeer], op: str) -> None:
    """All permutations of the ranks."""
    seconds: list[float] = []
    orders = list(itertools.permutations(peers))
    for done, order in enumerate(orders):
        renew(peers)
        try:
            seconds += join_all(list(order), op)
        except SpikeError as error:
            numbers = [peer.number for peer in order]
            raise SpikeError(f"order {numbers} ({done} orders passed): {error}") from None
    count = len(peers)
    report.metric(f"orders_of_{count}_passed", len(orders))
    report.metric(f"orders_of_{count}_connect_s", median(seconds))


def waiting_works(report: Report, peers: list[EpPeer]) -> None:
    """Can ranks that share a GPU wait for each other inside kernels?"""
    renew(peers)
    ep_group.connect(peers[1:], peers[:1])
    ep_group.unmask(peers)
    report.note("waiting_in_kernels", ep_group.joint(peers))


def together(peers: list[EpPeer], timeout_ms: int) -> None:
    """A serving group with the given device timeout."""
    renew(peers, timeout_ms)
    ep_group.connect(peers[1:], peers[:1])
    ep_group.unmask(peers)
    ep_group.joint(peers)


def others_step(peers: list[EpPeer], stopped: EpPeer) -> dict[str, object]:
    """The ranks that still run take one layer while they expect the stopped one."""
    others = [peer for peer in peers if peer is not stopped]
    world = [peer.number for peer in peers]
    call_all(others, "route", world=world, seed=3)
    steps = call_all(others, "watched_step", timeout_s=60)
    against_all = call_all(others, "check", active=world)
    without = call_all(others, "check", active=[peer.number for peer in others])
    return {"steps": steps, "against_all": against_all, "without_stopped": without}


def stopped_peer(
    report: Report, peers: list[EpPeer], timeout_ms: int, victim: int, after_dispatch: bool
) -> None:
    """SIGSTOP one rank, between steps or between dispatch and combine; then let it go on."""
    name = f"stop_{len(peers)}ranks_{timeout_ms}ms" + ("_mid_layer" if after_dispatch else "")
    together(peers, timeout_ms)
    stopped, others = peers[victim], [peer for peer in peers if peer.number != victim]
    stopped.call("route", world=[peer.number for peer in peers], seed=3)
    posted = stopped.send("half_step") if after_dispatch else None
    if posted is not None:
        time.sleep(0.02)  # its dispatch kernel is launched and waits for the others
    os.kill(stopped.pid, signal.SIGSTOP)
    found = others_step(peers, stopped)
    second = others_step(peers, stopped)
    os.kill(stopped.pid, signal.SIGCONT)
    if posted is not None:
        found["victim_half_step"] = stopped.receive(posted)
        found["victim_second_half_s"] = stopped.call("second_half")
        found["victim_masks"] = stopped.call("masks")
    else:
        found["victim_step"] = stopped.call("watched_step")
    found["victim_alone"] = stopped.call("check", active=[victim])
    report.note(name, {"first": found, "second": second})
    steps = found["steps"]
    if isinstance(steps, list):
        seen = [step["mask_seen_s"] for step in steps if step["mask_seen_s"] is not None]
        report.metric(f"{name}_mask_seen_s", max(seen, default=None))
        report.metric(f"{name}_step_s", max(step["step_s"] for step in steps))
    lost = found["against_all"]
    if isinstance(lost, list):
        report.metric(
            f"{name}_bad_token_share",
            sum(c["bad_tokens"] for c in lost) / sum(c["tokens"] for c in lost),
        )
    report.metric(f"{name}_second_step_s", max(step["step_s"] for step in second["steps"]))  # type: ignore[attr-defined]
    recover(report, name, peers, stopped, others)


def recover(
    report: Report, name: str, peers: list[EpPeer], stopped: EpPeer, others: list[EpPeer]
) -> None:
    """Is unmasking enough afterwards, or must the peers connect again?"""
    ep_group.unmask(peers)
    result = ep_group.joint(peers, op="eager", count=2, strict=False)
    result_again = ep_group.joint(peers, op="eager", count=2, strict=False)
    good = all(r["bad_tokens"] == 0 and r["masks_right"] for r in (result, result_again))
    report.metric(f"{name}_unmask_recovers", good)
    report.note(f"{name}_unmask", [result, result_again])
    stopped.call("set_masks", ranks=[peer.number for peer in others], masked=True)
    ep_group.disconnect(others, [stopped])
    stopped.call("drop")
    stopped.call("fresh", rank=stopped.number)
    ep_group.connect([stopped], others)
    ep_group.unmask(peers)
    again = [ep_group.joint(peers, op="eager", count=2, strict=False) for _ in range(2)]
    report.metric(
        f"{name}_reconnect_recovers", all(r["bad_tokens"] == 0 and r["masks_right"] for r in again)
    )
    report.note(f"{name}_reconnect", again)


def body(report: Report) -> None:
    """Three ranks, four ranks, then stopped peers."""
    gpus = GpuReadings().count
    report.metric("gpus", gpus)
    peers = ep_group.start([number % gpus for number in range(4)])
    ep_group.capture_alone(peers)
    waits = report.attempt("waiting_in_kernels", waiting_works, peers[:3])
    op = "replay" if waits else "phased"
    report.note("step_of_the_orders", op)
    report.attempt("orders_of_3", every_order, peers[:3], op)
    report.attempt("orders_of_4", every_order, peers, op)
    for group in (peers[:2], peers[:3]) if waits else (peers[:2],):
        for timeout_ms in STOP_TIMEOUTS_MS:
            stop = f"stop_{len(group)}ranks_{timeout_ms}ms"
            report.attempt(stop, stopped_peer, group, timeout_ms, 1, False)
        name = f"stop_{len(group)}ranks_500ms_mid_layer"
        report.attempt(name, stopped_peer, group, 500, 1, True)


if __name__ == "__main__":
    run_spike("ranks", body, kill_all)
