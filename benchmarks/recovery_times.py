"""How long recovery takes, in one deployment with three etcd members, under streaming load.

Coordinator failover: from kill -9 of the one that leads to the first write of the next. Aborted
operation: from the abort of a scale-up whose joiner failed to all of its slots free. etcd outage:
two of three members unplugged for 30 s; requests that failed, and the longest silence.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from provenance import write_result
from rich.console import Console

from dynamo_elastic.agent.base import SlotState
from dynamo_elastic.coordinator.records import OperationRecord, decode
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import Act
from dynamo_elastic.phases import Phase
from dynamo_elastic.testing.chaos.checker import check_answers, longest_silence_s
from dynamo_elastic.testing.chaos.etcd_members import SITES
from dynamo_elastic.testing.chaos.faults import undo
from dynamo_elastic.testing.chaos.history import Answer, History
from dynamo_elastic.testing.chaos.run import at_width, stream_ends
from dynamo_elastic.testing.chaos.scenario import NARROW, WIDE
from dynamo_elastic.testing.chaos.world import World, world

OUTAGE_S = 30.0
_WAIT_S = 30.0
_POLL_S = 0.01
_JOINER = 2


async def failover_s(here: World) -> float:
    """kill -9 of the leader, until another one leads."""
    keys, store = here.deployment.keys, here.deployment.store
    before = await store.get(keys.leader)
    pid = await here.pid("coordinator")
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while time.monotonic() - began_s < _WAIT_S:
        now = await store.get(keys.leader)
        if now is not None and before is not None and now.mod_revision != before.mod_revision:
            return time.monotonic() - began_s
        await asyncio.sleep(_POLL_S)
    raise ElasticError("nobody leads")


async def abort_s(here: World) -> float:
    """A joiner whose CHECK fails: from the end of its phase to its slot free or parked."""
    here.arm(f"slot{_JOINER}:worker.check.begin", str(Act.ERROR))
    await here.scale(WIDE)
    began_s = await _aborting_since_s(here)
    while time.monotonic() - began_s < _WAIT_S:
        slot = next((s for s in await here.slots() if s.slot == _JOINER), None)
        if slot is not None and slot.state is SlotState.FREE:
            return time.monotonic() - began_s
        await asyncio.sleep(_POLL_S)
    raise ElasticError("the joiner's slot does not become free")


async def _aborting_since_s(here: World) -> float:
    keys, store = here.deployment.keys, here.deployment.store
    deadline_s = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline_s:
        stored = await store.get(keys.operation)
        if stored is not None and decode(OperationRecord, stored.value).phase is Phase.ABORTING:
            return time.monotonic()
        await asyncio.sleep(_POLL_S)
    raise ElasticError("the operation was not aborted")


async def outage(here: World) -> list[Answer]:
    """What clients got while etcd was away, and until a stream has ended after it."""
    here.history()
    members = here.etcd.members
    for member in members[: len(members) // 2 + 1]:
        here.etcd.unplug(member)
    await asyncio.sleep(OUTAGE_S)
    during = here.history().answers
    await asyncio.to_thread(here.etcd.revive)
    await at_width(here, NARROW)
    await stream_ends(here)
    return during + here.history().answers


def requests_lost(answers: list[Answer], reference: dict[str, str]) -> int:
    wrong = check_answers(History("", reference=reference, answers=answers))
    return len(wrong) + sum(bool(a.error) for a in answers)


async def measure(work_dir: Path, rounds: int, console: Console) -> dict[str, Any]:
    found: dict[str, Any] = {"failover_s": [], "abort_s": []}
    answers: list[Answer] = []
    async with world(work_dir, members=3, say=console.print, site=SITES - 1) as here:
        ttl_s = here.config.scale.lease_ttl_s
        for number in range(rounds):
            await at_width(here, NARROW)
            found["failover_s"].append(round(await failover_s(here), 3))
            await at_width(here, NARROW)
            found["abort_s"].append(round(await abort_s(here), 3))
            await at_width(here, WIDE)
            await at_width(here, NARROW)
            answers += here.history().answers
            console.print(f"round {number}: {found['failover_s'][-1]} s, {found['abort_s'][-1]} s")
        lost = requests_lost(answers, here.reference)
        during = await outage(here)
        found |= {
            "lease_ttl_s": ttl_s,
            "requests": len(answers),
            "requests_failed": lost,
            "outage_requests": len(during),
            "outage_requests_failed": requests_lost(during, here.reference),
            "outage_silence_s": round(longest_silence_s(during), 3),
        }
        await undo(here)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work-dir", type=Path, default=Path(".chaos"))
    arguments = parser.parse_args()
    console = Console(highlight=False)
    found = asyncio.run(measure(arguments.work_dir.resolve(), arguments.rounds, console))
    metrics = {
        "failover_max_s": max(found["failover_s"]),
        "failover_median_s": statistics.median(found["failover_s"]),
        "failover_beyond_ttl_max_s": round(max(found["failover_s"]) - found["lease_ttl_s"], 3),
        "abort_frees_slots_max_s": max(found["abort_s"]),
        "requests_total": found["requests"],
        "requests_failed": found["requests_failed"],
        "etcd_outage_s": OUTAGE_S,
        "etcd_outage_requests_total": found["outage_requests"],
        "etcd_outage_requests_failed": found["outage_requests_failed"],
        "etcd_outage_silence_max_s": found["outage_silence_s"],
    }
    path = write_result("recovery_times", metrics, found)
    for name, value in metrics.items():
        console.print(f"{name:32} {value}")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
