"""The simulation's numbers, each out of a measured result; a result that is missing is named."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from operation_model import NO_CONTROL, Control, Engine, Fabric, scale_up
from results import Result

GIGA = 1e9
NODE_GPUS = 8
FITTED_CYCLES = 10
"""Of cpu_scale: the engine's parts are taken from these, and its operations checked in the rest."""

Results = Mapping[str, Result]


class Missing(Exception):
    """A result that is needed has not been measured."""


def control_of(results: Results) -> Control:
    """Least squares over the runs of control_plane, whose ranks do nothing but answer: steps by
    participants; by the square of the ranks what REBALANCE takes beyond its steps, reading two
    topologies, and then CONNECT beyond its own, reading one and the endpoints; commits by ranks."""
    detail = _of(results, "control_plane")["detail"]
    boots, ups = {}, {}
    for ranks, operations in detail["phases_s"].items():
        boots[int(ranks)] = operations[0]
        ups[int(ranks)] = [o for o in operations[1:] if "restore" in o]
    few = detail["step"]
    points = [(n, boot[p]) for n, boot in boots.items() for p in ("restore", "canary", "serve")]
    for phase, participants in (("restore", few), ("check", few + 1), ("canary", few + 1)):
        points += [(participants, statistics.median(o[phase] for o in u)) for u in ups.values()]
    step_s, worker_s = _line(*zip(*points, strict=True))

    def steps(*participants: int) -> float:
        return step_s * len(participants) + worker_s * sum(participants)

    moving = {n: statistics.median(o["rebalance"] for o in u) for n, u in ups.items()}
    topology_line_s = _square({n: t - steps(n, few, few, n, n) for n, t in moving.items()}) / 2
    told = {n: boot["connect"] - steps(n, n) for n, boot in boots.items()}
    endpoint_s = max(0.0, _square(told) - topology_line_s)
    rungs = detail["rungs"]
    commit_s, commit_worker_s = _line(
        [r["ranks"] for r in rungs], [r["commit_p50_ms"] / 1e3 for r in rungs]
    )
    return Control(step_s, worker_s, topology_line_s, endpoint_s, commit_s, commit_worker_s)


def cpu_engine(results: Results, control: Control) -> Engine:
    """What the reference engine needs on the CPU beyond the control plane: medians of the first
    cycles of cpu_scale."""
    ups = [p for p in _of(results, "cpu_scale")["detail"]["phases_s"] if "restore" in p]
    ups = ups[:FITTED_CYCLES]
    bare = scale_up(2, 4, control, _NOTHING, Fabric(4, 1.0, 1.0)).phases_s

    def own(phase: str) -> float:
        return max(0.0, float(statistics.median(p[phase] for p in ups)) - bare[phase])

    return Engine(
        restore_s=own("restore"),
        open_s=0.0,
        connect_s=own("connect") + own("stream") + own("plan"),
        connect_peer_s=0.0,
        check_s=own("check"),
        switch_s=own("commit"),
        canary_s=own("canary"),
        serve_s=own("serve"),
        rebalance_s=own("rebalance"),
        dense_bytes=0.0,
        digest_gbps=1.0,
    )


def gpu_engine(results: Results, tier: str, dense_bytes: float) -> Engine:
    """What the reference engine needs on a GPU, from benchmarks of its parts alone."""
    tiers, rebind = _metrics(results, "snapshot_tiers"), _metrics(results, "gpu_rebind")
    ranks, rank = _metrics(results, "spike_ranks"), _metrics(results, "spike_same_rank")
    peer_s = ranks["orders_of_4_connect_s"] - ranks["orders_of_3_connect_s"]
    step_s = rebind["joint_step_ms"] / 1e3
    return Engine(
        restore_s=tiers[f"{tier}_restore_s"],
        open_s=rank["fresh_buffer_make_s"],
        connect_s=rank["fresh_buffer_join_s"] + rebind["rebind_s"] + rebind["probe_s"],
        connect_peer_s=max(0.0, peer_s),
        check_s=step_s,
        switch_s=2 * step_s,
        canary_s=step_s,
        serve_s=step_s,
        rebalance_s=0.0,
        dense_bytes=dense_bytes,
        digest_gbps=_metrics(results, "gpu_stream")["digest_gbps"],
    )


def fabric_of(results: Results, published: Sequence[Mapping[str, Any]]) -> Fabric:
    """NVLink as measured; the network as published, for none has been measured here."""
    network = next(p for p in published if p["id"] == "modelexpress_gpu_gbps")
    node_gbps = _metrics(results, "gpu_stream")["best_gbps"]
    return Fabric(NODE_GPUS, node_gbps, float(network["value"]))


@dataclass(frozen=True, slots=True)
class Check:
    """One measured operation against the model."""

    name: str
    ranks: int
    how: str
    measured_s: float
    simulated_s: float

    @property
    def rel_err(self) -> float:
        return abs(self.simulated_s - self.measured_s) / self.measured_s


def checks_of(results: Results, control: Control) -> list[Check]:
    """Whole operations that were measured and that no parameter was taken from, the largest last.

    On GPUs: each scale-up of gpu_scale, which has no coordinator, up to the joiner's first token.
    """
    found = []
    cpu = _of(results, "cpu_scale")["detail"]["phases_s"]
    rest = [sum(p.values()) for p in cpu if "restore" in p][FITTED_CYCLES:]
    if rest:
        fabric = Fabric(4, 1.0, 1.0)
        simulated_s = scale_up(2, 4, control, cpu_engine(results, control), fabric).total_s
        how = f"parts from cycles 1-{FITTED_CYCLES}, checked against the rest"
        found.append(Check("cpu_scale 2 -> 4", 4, how, statistics.median(rest), simulated_s))
    if "gpu_scale" in results:
        found += _gpu_checks(results)
    return sorted(found, key=lambda c: (c.name.startswith("gpu"), c.ranks))


def _gpu_checks(results: Results) -> list[Check]:
    result = results["gpu_scale"]
    metrics, detail = result["metrics"], result["detail"]
    gpus = int(metrics["gpus"])
    found = []
    for name, tier in (("up_image", "image"), ("up_parked", "parked")):
        if f"{name}_s" not in metrics:
            continue
        joiners = gpus - gpus // 2
        engine = gpu_engine(results, tier, detail[f"{name}_dense_bytes"] / joiners)
        node_gbps = _metrics(results, "gpu_stream")["best_gbps"]
        fabric = Fabric(NODE_GPUS, node_gbps, node_gbps)
        operation = scale_up(gpus // 2, gpus, NO_CONTROL, engine, fabric)
        simulated_s = operation.total_s - operation.phases_s["rebalance"]
        label = f"gpu_scale {gpus // 2} -> {gpus}, {tier}"
        how = "parts from snapshot_tiers, gpu_rebind, gpu_stream and spikes"
        found.append(Check(label, gpus, how, metrics[f"{name}_s"], simulated_s))
    return found


_NOTHING = Engine(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares of seconds = a + b * size, neither below 0; relative errors count, so that
    small sizes do too."""
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(set(sizes)) < 2:
        return 0.0, float(np.mean(y / x))
    rows = np.stack([1 / y, x / y], axis=1)
    a, b = np.linalg.lstsq(rows, np.ones_like(y), rcond=None)[0]
    if a < 0:
        return 0.0, float(np.mean(y / x))
    return float(a), max(0.0, float(b))


def _square(seconds: Mapping[int, float]) -> float:
    """Least squares of seconds = c * ranks squared, not below 0."""
    squares = np.asarray([float(n) ** 2 for n in seconds])
    return max(0.0, float(np.dot(list(seconds.values()), squares) / np.dot(squares, squares)))


def _of(results: Results, name: str) -> Result:
    if name not in results:
        raise Missing(f"{name} has not been measured: python benchmarks run {name}")
    return results[name]


def _metrics(results: Results, name: str) -> dict[str, float]:
    metrics: dict[str, float] = _of(results, name)["metrics"]
    return metrics
