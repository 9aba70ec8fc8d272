"""Writes what this version stores, once, to be read by every later one: test_golden.py.

    python tests/golden/make.py

Files that are there already are never written again: what was stored once, is stored somewhere.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dynamo_elastic.agent.base import Lease, Tier
from dynamo_elastic.agent.records import EngineRecord, ParkedRecord
from dynamo_elastic.coordinator import records
from dynamo_elastic.coordinator.records import (
    AckRecord,
    AckStatus,
    CapacityRecord,
    CommandRecord,
    EarlierTarget,
    EndpointRecord,
    MemberRecord,
    MemberState,
    OperationRecord,
    OutcomeStatus,
    PhaseRecord,
    Strike,
    TargetOutcome,
    TargetRecord,
    WarningRecord,
)
from dynamo_elastic.phases import Kind, Phase, Step
from dynamo_elastic.snapshot import manifest as manifests
from dynamo_elastic.snapshot.fingerprint import Fingerprint
from dynamo_elastic.snapshot.manifest import GpuState, ImageFile, Manifest
from dynamo_elastic.snapshot.park import ParkedReport
from dynamo_elastic.snapshot.process import ProcessRef
from dynamo_elastic.snapshot.sizes import ImageSizes
from dynamo_elastic.topology import EngineShape, Member, PlanInput, Topology, plan_scale
from dynamo_elastic.types import Epoch, FencingToken, Incarnation, OperationId, WorkerId

HERE = Path(__file__).parent
A, B = WorkerId("slot0"), WorkerId("slot1")
OPERATION = OperationId("op-7")
BEFORE = Topology(Epoch(6), (Member(A, Incarnation("slot0-1a2b"), (0, 1)),))
PLAN = plan_scale(PlanInput(BEFORE, 2, Epoch(7), EngineShape(2, 2), (B,), frozenset()))


def stored_records() -> dict[str, object]:
    """One of every kind that is stored in etcd, every field set."""
    operation = OperationRecord(
        operation_id=OPERATION,
        kind=Kind.UP,
        plan=PLAN,
        phase=Phase.STREAM,
        source="planner",
        request_id="r-1",
        token=FencingToken(41),
        topology_revision=40,
        opened_at_s=1764500000.5,
        requested_ranks=2,
        phases=(PhaseRecord(Phase.PLAN, 1764500000.5, 0.25, {"plan_s": 0.25}),),
        participants={A: "stream done"},
        lost=(B,),
        discarded=(B,),
        current=PLAN.after,
        failure="none yet",
        elapsed_s=1.5,
        safe_to_release=(B,),
        served=BEFORE,
        strikes={B: Strike(2, "no answer", 1764499990.0)},
        cold=(B,),
    )
    member = MemberRecord(A, 0, "host-a", 4242, MemberState.SERVING, Incarnation("i"), "gone")
    command = CommandRecord(
        OPERATION, Epoch(7), FencingToken(41), 3, Step.STREAM, 30.0, {"to": ["slot1"]}
    )
    ack = AckRecord(
        *(OPERATION, FencingToken(41), 3, Step.STREAM, AckStatus.DONE),
        *("why", 0.5, {"bytes": 17}),
    )
    earlier = EarlierTarget("r-0", 1, "cli", 1764499000.0, "by hand")
    return {
        "topology": PLAN.after,
        "operation": operation,
        "epoch": 7,
        "target": TargetRecord("r-1", 2, "planner", 1764500000.0, "decision 3", (earlier,), B),
        "outcome": TargetOutcome("r-1", 2, OutcomeStatus.REACHED, "as wanted", OPERATION),
        "notice": "waits for slots",
        "capacity": CapacityRecord(1, (1, 2), 2, {B: "failed twice"}, 1764500300.0),
        "warning": WarningRecord("two planners", 1764500001.0),
        "member": member,
        "command": command,
        "ack": ack,
        "endpoint": EndpointRecord(A, Incarnation("i"), Epoch(7), {"host": "10.0.0.1", "port": 7}),
    }


def manifest() -> Manifest:
    texts: dict[str, Any] = {f.name: f"the {f.name}" for f in fields(Fingerprint)}
    fingerprint = Fingerprint(**{**texts, "schema": 2, "argv": ("python", "-m", "x"), "slot": 1})
    return Manifest(
        image_id="slot1-20261130t170000-3f9a",
        slot=1,
        created_at="2026-11-30T17:00:00.000+00:00",
        root_pid=2000,
        fingerprint=fingerprint,
        files=(ImageFile("core-2000.img", 5, "00" * 16), ImageFile("pages-1.img", 4096, "11" * 16)),
        thread_ids=(2000, 2001),
        timings_s={"boot": 1.25, "dump": 0.00001},
        engine={"socket": "engine.sock", "warm": True},
        gpu=GpuState(1, {"GPU-0": 1 << 30}),
        sizes=ImageSizes(),
    )


def agent_records() -> dict[str, object]:
    process = ProcessRef(4711, 123456)
    engine = EngineRecord(
        slot=1,
        lease=Lease(OPERATION, B, Epoch(7)),
        incarnation=Incarnation("slot1-00ff"),
        tier=Tier.IMAGE,
        process=process,
        fingerprint=manifest().fingerprint,
        attached=True,
        ready_s=0.75,
        image_id=manifest().image_id,
        fell_through=("parked: absent",),
    )
    parked = ParkedRecord(
        slot=1,
        report=ParkedReport(process, (process,), {"GPU-0": 1 << 30}, 0, 1 << 28, {"lock": 0.001}),
        fingerprint=manifest().fingerprint,
        image_id=manifest().image_id,
        parked_at_s=1764500000.0,
        host_bytes=1 << 28,
    )
    return {"engine": engine, "parked": parked}


def write(path: Path, data: bytes) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    for name, record in stored_records().items():
        kind = HERE / f"records-v{records.SCHEMA_VERSION}"
        write(kind / f"{name}.json", records.encode(record))
    data = manifests.encode(manifest())
    write(HERE / f"manifest-v{manifests.SCHEMA_VERSION}.json", data)
    for name, record in agent_records().items():
        write(HERE / "agent-v1" / f"{name}.json", TypeAdapter(type(record)).dump_json(record))
