"""An operation of 2 -> 1,024 ranks as discrete events, every number out of a measured result.

Writes the plots and the table of docs/scaling.md; checks itself against whole operations that were
measured and that no parameter was taken from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from operation_model import Control, Engine, Fabric, Operation, fan_out_s, scale_up
from parameters import Missing, checks_of, control_of, fabric_of, gpu_engine
from provenance import write_result
from results import newest_results
from scaling_page import write_page

REFERENCE_POINTS = Path(__file__).with_name("reference_points.json")
BEFORE = 2
SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
TIERS = ("image", "parked")
TOLERANCE = 0.2


def dense_bytes(workload: Mapping[str, Any]) -> float:
    """Of what every rank holds: attention, routers, embeddings and head."""
    hidden, head = workload["hidden_size"], workload["head_dim"]
    queries, keys = workload["num_attention_heads"] * head, workload["num_key_value_heads"] * head
    layer = 2 * hidden * queries + 2 * hidden * keys + hidden * workload["num_experts"]
    values = workload["num_hidden_layers"] * layer + 2 * workload["vocab_size"] * hidden
    return float(values * workload["bytes_per_value"])


def sweep(control: Control, engines: Mapping[str, Engine], fabric: Fabric) -> list[dict[str, Any]]:
    """Seconds of each phase, what dominates, what etcd does: by tier and size, with weights as they
    go today and in a tree."""
    rows = []
    for (tier, engine), tree in product(engines.items(), (False, True)):
        for after in SIZES:
            operation = scale_up(BEFORE, after, control, engine, fabric, tree=tree)
            rows.append({"tier": tier, "tree": tree, "ranks": after} | _told(operation))
    return rows


def _told(operation: Operation) -> dict[str, Any]:
    return {
        "total_s": round(operation.total_s, 3),
        "dominant": operation.dominant,
        "phases_s": {p: round(s, 4) for p, s in operation.phases_s.items()},
        "etcd_busy_s": round(operation.etcd_busy_s, 3),
        "etcd_requests": operation.etcd_requests,
        "etcd_lines": operation.etcd_lines,
    }


def expert_bytes(workload: Mapping[str, Any]) -> float:
    """Of a rank's expert slots: it has as many as each of the first ranks has experts."""
    values = 3 * workload["hidden_size"] * workload["moe_intermediate_size"]
    experts = workload["num_experts"] / BEFORE * workload["num_hidden_layers"]
    return float(experts * values * workload["bytes_per_value"])


def fan_outs(sizes_bytes: Mapping[str, float], fabric: Fabric) -> list[dict[str, float]]:
    """Weights to all joiners: every copy from the retained ranks, or in a tree."""
    rows = []
    for after in SIZES:
        row: dict[str, float] = {"ranks": after}
        for name, size_bytes in sizes_bytes.items():
            for way in ("direct", "tree"):
                seconds = fan_out_s(BEFORE, after - BEFORE, size_bytes, fabric, tree=way == "tree")
                row[f"{name}_{way}_s"] = round(seconds, 4)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="check only; write nothing")
    args = parser.parse_args()
    results, points = newest_results(), json.loads(REFERENCE_POINTS.read_text())
    try:
        control, fabric = control_of(results), fabric_of(results, points["published"])
        size_bytes = dense_bytes(points["workload"])
        engines = {tier: gpu_engine(results, tier, size_bytes) for tier in TIERS}
        checks = checks_of(results, control)
    except Missing as exc:
        print(f"simulate: {exc}", file=sys.stderr)
        return 2
    for check in checks:
        print(
            f"{check.name}: measured {check.measured_s:.3f} s, simulated {check.simulated_s:.3f} s,"
            f" {100 * check.rel_err:.0f} % ({check.how})"
        )
    if args.check:
        return 0 if checks and checks[-1].rel_err <= TOLERANCE else 1
    rows = sweep(control, engines, fabric)
    sizes_bytes = {"dense": size_bytes, "experts": expert_bytes(points["workload"])}
    detail = {
        "parameters": {
            "control": asdict(control),
            "engines": {tier: asdict(engine) for tier, engine in engines.items()},
            "fabric": asdict(fabric),
        },
        "checks": [asdict(c) | {"rel_err": round(c.rel_err, 4)} for c in checks],
        "operations": rows,
        "weights_bytes": sizes_bytes,
        "weights": fan_outs(sizes_bytes, fabric),
    }
    largest = checks[-1]
    metrics = {"sim_rel_err": round(largest.rel_err, 4), "checked_ranks": largest.ranks}
    metrics |= {f"up_{r['tier']}_{r['ranks']}_s": r["total_s"] for r in rows if not r["tree"]}
    print(write_result("simulate", metrics, detail))
    write_page(detail, results["control_plane"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
