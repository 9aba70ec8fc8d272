"""Driver's side of NIXL EP ranks: start, connect, step together, check."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from common import GpuReadings, Report, SpikeError
from rank_process import Rank, call_all, value_of

GOOD_ERROR = 0.01


class EpPeer(Rank):
    """A rank of the expert-parallel group; `number` is its NIXL EP rank."""

    def __init__(self, number: int, gpu: int, **options: Any) -> None:
        super().__init__("ep_rank.py", f"r{number}", gpu, **options)
        self.number = number


def start(
    gpus: Sequence[int],
    max_ranks: int = 4,
    timeout_ms: int = 4000,
    *,
    first_pid: int | None = None,
    **options: Any,
) -> list[EpPeer]:
    """One rank per entry of `gpus`, opened; with `first_pid` each gets a pid range of its own."""
    peers = []
    for number, gpu in enumerate(gpus):
        pid = None if first_pid is None else first_pid + 3000 * number
        peers.append(EpPeer(number, gpu, first_pid=pid, **options))
        if first_pid is not None:
            peers[-1].wait_ready()
    for peer in peers:
        peer.wait_ready()
    sent = [
        (peer, peer.send("open", rank=peer.number, max_ranks=max_ranks, timeout_ms=timeout_ms))
        for peer in peers
    ]
    for peer, index in sent:
        value_of(peer, "open", peer.receive(index, 90))
    return peers


def capture_alone(peers: Sequence[EpPeer], **options: Any) -> list[dict[str, Any]]:
    """Every rank captures its graphs with all remote peers masked."""
    for peer in peers:
        peer.call("route", world=[peer.number])
    call_all(peers, "keep_templates")
    return call_all(peers, "capture", timeout_s=150, **options)


def connect(
    newcomers: Sequence[EpPeer],
    present: Sequence[EpPeer],
    *,
    activate: bool = False,
    timeout_s: float = 40,
) -> list[float]:
    """Connect newcomers to the ranks present and to each other, all sides at once."""
    everyone = [*present, *newcomers]
    blobs = dict(zip(everyone, call_all(everyone, "metadata"), strict=True))
    posted = []
    for peer in everyone:
        others = [
            other
            for other in everyone
            if other is not peer and (peer in newcomers or other in newcomers)
        ]
        args = {
            "ranks": [other.number for other in others],
            "blobs": [blobs[other] for other in others],
        }
        if others:
            posted.append((peer, peer.send("connect", activate=activate, **args)))
    return [value_of(peer, "connect", peer.receive(index, timeout_s)) for peer, index in posted]


def unmask(everyone: Sequence[EpPeer]) -> None:
    """All ranks take all others in."""
    posted = []
    for peer in everyone:
        others = [other.number for other in everyone if other is not peer]
        posted.append((peer, peer.send("set_masks", ranks=others, masked=False)))
    for peer, index in posted:
        value_of(peer, "set_masks", peer.receive(index))


def disconnect(first: Sequence[EpPeer], second: Sequence[EpPeer]) -> list[float]:
    """Every rank of each side unmaps every rank of the other, all at once."""
    posted = []
    for side, other_side in ((first, second), (second, first)):
        for peer in side:
            posted.append(
                (peer, peer.send("disconnect", ranks=[other.number for other in other_side]))
            )
    return [value_of(peer, "disconnect", peer.receive(index, 40)) for peer, index in posted]


def joint(
    everyone: Sequence[EpPeer],
    *,
    op: str = "replay",
    count: int = 1,
    seed: int = 7,
    strict: bool = True,
) -> dict[str, Any]:
    """One step of all ranks over everyone's experts; SpikeError where tokens are wrong."""
    world = [peer.number for peer in everyone]
    call_all(everyone, "route", world=world, seed=seed)
    seconds, arrived = _step(everyone, op, count)
    checks = call_all(everyone, "check", active=world)
    masks = call_all(everyone, "masks")
    result = {
        "world": world,
        "worst_error": max(check["error"] for check in checks),
        "bad_tokens": sum(check["bad_tokens"] for check in checks),
        "step_s": max(seconds),
        "masks": masks,
    }
    if arrived is not None:
        result["arrived"] = arrived
    expected = [0 if number in world else 1 for number in range(len(masks[0]))]
    result["masks_right"] = all(mask == expected for mask in masks)
    if strict and (
        result["bad_tokens"] or result["worst_error"] > GOOD_ERROR or not result["masks_right"]
    ):
        raise SpikeError(f"joint step is wrong: {result}")
    return result


def phased(everyone: Sequence[EpPeer], *, seed: int = 7, strict: bool = True) -> dict[str, Any]:
    """A joint step in four turns, for ranks that share GPUs and so cannot wait inside kernels."""
    return joint(everyone, op="phased", seed=seed, strict=strict)


def _step(everyone: Sequence[EpPeer], op: str, count: int) -> tuple[list[float], Any]:
    if op != "phased":
        return call_all(everyone, op, count=count, timeout_s=90), None
    begin = time.perf_counter()
    call_all(everyone, "phase", name="dispatch_send")
    arrived = call_all(everyone, "arrivals")
    for name in ("dispatch_recv", "combine_send", "combine_recv"):
        call_all(everyone, "phase", name=name)
    return [time.perf_counter() - begin], arrived


def alone(peer: EpPeer) -> dict[str, Any]:
    """One step of a rank whose peers are masked."""
    peer.call("route", world=[peer.number])
    peer.call("replay")
    result: dict[str, Any] = peer.call("check", active=[peer.number])
    if result["error"] > GOOD_ERROR:
        raise SpikeError(f"{peer.tag} alone is wrong: {result}")
    return result


def assert_nvlink(
    report: Report, readings: GpuReadings, everyone: Sequence[EpPeer], name: str, steps: int = 200
) -> dict[str, Any]:
    """Show the lane itself: peers mapped into the kernels, bytes counted on the links."""
    lanes = call_all(everyone, "lanes")
    call_all(everyone, "route", world=[peer.number for peer in everyone])
    gpu = everyone[0].gpu
    idle, _ = readings.nvlink_during(gpu, lambda: call_all(everyone, "masks"))
    crossed, seconds = readings.nvlink_during(
        gpu, lambda: call_all(everyone, "replay", count=steps, timeout_s=120)
    )
    found = {"lanes": lanes, "nvlink_idle_bytes": idle, "nvlink_bytes": crossed, "step_s": seconds}
    report.note(f"{name}_lane", found)
    if crossed is not None:
        report.metric(f"{name}_nvlink_mb_per_step", crossed / steps / 1e6)
    report.metric(f"{name}_step_ms", max(seconds) * 1e3)
    return found
