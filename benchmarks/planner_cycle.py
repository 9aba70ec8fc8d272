"""Load rises and falls, Dynamo's real planner scales 2 -> 4 -> 2 by its own decisions, and planner,
coordinator, frontend and etcd are killed (kill -9) in the middle of an operation, each once on the
way up and once on the way down.

What counts: every request but those that a killed frontend took with it or could not accept; see
testing/request_meter.py. They are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from provenance import write_result
from rich.console import Console

from dynamo_elastic.demo.run import leftovers
from dynamo_elastic.phases import Kind
from dynamo_elastic.testing.etcd_process import etcd_process
from dynamo_elastic.testing.planner_cycle import CycleResult, Part, cycle_config, planner_cycles

CLIENTS = 40
KILLS = [(part, part) for part in (Part.COORDINATOR, Part.PLANNER, Part.FRONTEND, Part.ETCD)]


def metrics_of(result: CycleResult) -> dict[str, float]:
    meter, halves = result.meter, result.halves
    return {
        "requests_total": meter.total,
        "requests_failed": meter.failed,
        "requests_cut_off_by_frontend_kill": meter.cut_off,
        "requests_not_accepted_without_frontend": meter.not_accepted,
        "tokens_equal": int(meter.unequal == 0 and meter.total > meter.failed),
        "ups": result.decided(Kind.UP),
        "downs": result.decided(Kind.DOWN),
        "restarts": sum(bool(h.killed_in) for h in halves),
        "stable_after": sum(h.stable for h in halves),
        "halves": len(halves),
        "slowest_half_s": round(max(h.elapsed_s for h in halves), 1),
    }


def detail_of(result: CycleResult) -> dict[str, Any]:
    return {
        "errors": sorted(result.meter.errors),
        "halves": [asdict(h) for h in result.halves],
        "operations": [
            {"id": name, "kind": kind, "source": source}
            for name, (kind, source) in result.operations.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="at least so many")
    parser.add_argument("--work-dir", type=Path, default=Path(".demo/planner-cycle"))
    arguments = parser.parse_args()
    console, work_dir = Console(highlight=False), arguments.work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work_dir / "etcd", ignore_errors=True)
    with etcd_process(work_dir / "etcd") as etcd:
        config = cycle_config(work_dir, etcd)
        result = asyncio.run(
            planner_cycles(
                config,
                etcd,
                KILLS,
                clients=CLIENTS,
                requests_min=arguments.requests,
                say=console.print,
            )
        )
    left = leftovers(config, set())
    metrics = metrics_of(result)
    path = write_result("planner_cycle", metrics, detail_of(result) | {"leftovers": left})
    for name, value in metrics.items():
        console.print(f"{name:40} {value}")
    console.print(f"written to {path}")
    wrong = metrics["requests_failed"] or not metrics["tokens_equal"] or left
    if wrong or not metrics["stable_after"] == metrics["restarts"] == metrics["halves"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
