"""The scale protocol in simulated deployments: every failpoint x mishap x process, then seeds.

    python benchmarks/protocol_sim.py                      # all systematic schedules, then seeds
    python benchmarks/protocol_sim.py --first 50000 --count 20000 --add

`--add` adds this range to the result of the same day, whose ranges must not overlap it. Schedules
are numbered: first the systematic ones, then one a seed; a violation is reported with its number,
and `--first NUMBER --count 1` plays it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from typing import Any

from provenance import RESULTS, write_result

from dynamo_elastic.failpoint_table import FAILPOINTS, Actor
from dynamo_elastic.testing.simulation import Schedule, Verdict, play
from dynamo_elastic.testing.simulation_schedules import scrambled, systematic

NAME = "protocol_sim"
CHUNK = 100
TARGET = 100_000
_SHOWN = 20


@cache
def _systematic() -> tuple[Schedule, ...]:
    return tuple(systematic())


def schedule(number: int) -> Schedule:
    """Schedule `number` of all."""
    known = _systematic()
    return known[number] if number < len(known) else scrambled(number - len(known))


def play_range(first: int, count: int) -> tuple[int, Counter[str], list[dict[str, Any]]]:
    """Schedules played, faults injected at each place, and every schedule that violated
    something."""
    logging.disable(logging.CRITICAL)
    met, bad = Counter[str](), []
    for number in range(first, first + count):
        verdict = play(schedule(number))
        met.update(verdict.met)
        if verdict.violations:
            bad.append(_told(number, verdict))
    return count, met, bad


def _told(number: int, verdict: Verdict) -> dict[str, Any]:
    return {"number": number, **asdict(verdict)}


def _chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    for start in range(first, first + count, CHUNK):
        yield start, min(CHUNK, first + count - start)


def run(first: int, count: int, processes: int, limit_s: float) -> dict[str, Any]:
    """Play the range, or what of it fits in `limit_s`."""
    began_s, schedules, met = time.monotonic(), 0, Counter[str]()
    bad: list[dict[str, Any]] = []
    with ProcessPoolExecutor(processes) as pool:
        chunks = _chunks(first, count)
        window = [pool.submit(play_range, *c) for c in islice(chunks, processes * 2)]
        while window:
            played, here, worse = window.pop(0).result()
            schedules, bad = schedules + played, bad + worse
            met += here
            following = next(chunks, None)
            if following is not None and time.monotonic() - began_s < limit_s:
                window.append(pool.submit(play_range, *following))
    return {
        "first": first,
        "schedules": schedules,
        "faults_injected": met.total(),
        "violations": len(bad),
        "seconds": round(time.monotonic() - began_s, 3),
        "violated": bad[:_SHOWN],
        "met": dict(sorted(met.items())),
    }


def failpoints_met(ranges: list[dict[str, Any]]) -> dict[str, int]:
    """How often each failpoint of coordinator and shells has been hit."""
    actors = (Actor.COORDINATOR, Actor.SHELL)
    return {
        f.name: sum(r["met"].get(f.name, 0) for r in ranges)
        for f in FAILPOINTS
        if f.actor in actors
    }


def _known_ranges() -> list[dict[str, Any]]:
    path = RESULTS / f"{NAME}-{datetime.now(UTC).date().isoformat()}.json"
    known: list[dict[str, Any]] = json.loads(path.read_text())["detail"]["ranges"]
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=TARGET)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("--add", action="store_true", help="to the result of the same day")
    args = parser.parse_args()
    known = _known_ranges() if args.add else []
    for other in known:
        if args.first < other["first"] + other["schedules"] and other["first"] < (
            args.first + args.count
        ):
            parser.error(f"--first: {other['first']} and on have been played already")
    ranges = [*known, run(args.first, args.count, args.processes, args.limit_s)]
    sums = ("schedules", "violations", "faults_injected", "seconds")
    metrics = {name: float(sum(r[name] for r in ranges)) for name in sums}
    hits = failpoints_met(ranges)
    metrics |= {
        "failpoints": float(len(hits)),
        "failpoints_met": float(sum(map(bool, hits.values()))),
    }
    detail = {"systematic": len(_systematic()), "failpoints_met": hits, "ranges": ranges}
    path = write_result(NAME, metrics, detail)
    print(json.dumps(metrics), path)
    return 1 if metrics["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
