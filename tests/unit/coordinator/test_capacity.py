"""Which widths can be had, from what is stored."""

from __future__ import annotations

from dataclasses import replace

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.capacity import capacity_of
from dynamo_elastic.coordinator.records import (
    MemberRecord,
    MemberState,
    OperationRecord,
    Strike,
)
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.phases import Kind, Phase
from dynamo_elastic.topology import EngineShape, Member, ScalePlan, Topology
from dynamo_elastic.types import Epoch, FencingToken, Incarnation, OperationId, WorkerId

SHAPE = EngineShape(num_experts=16, slots_per_rank=8)
CONFIG = ScaleConfig(initial_ranks=2, max_ranks=6, quarantine_s=300.0)


def status(
    serving: int = 2, free: int = 2, lost: int = 0, strikes: dict[str, Strike] | None = None
) -> Status:
    """`serving` ranks, the last `lost` of them dead, and `free` slots after them."""
    names = [WorkerId(f"slot{k}") for k in range(serving + free)]
    members = {}
    for k, name in enumerate(names):
        state = MemberState.SERVING if k < serving else MemberState.STANDBY
        incarnation = Incarnation("i" if k < serving else "")
        members[name] = MemberRecord(name, k, "host", k, state, incarnation)
    for name in names[serving - lost : serving]:
        members[name] = replace(members[name], lost_reason="died")
    topology = Topology(Epoch(1), tuple(Member(n, Incarnation("i")) for n in names[:serving]))
    plan = ScalePlan(Kind.BOOT, Topology(Epoch(0)), topology, topology)
    last = OperationRecord(
        OperationId("op"), Kind.BOOT, plan, Phase.DONE, "boot", "", FencingToken(1), 0, 0.0
    )
    last = replace(last, strikes=strikes or {})
    return Status(topology=topology, epoch=1, members=members, last=last)


def test_legal_widths_are_those_of_model_settings_and_slots() -> None:
    now = capacity_of(status(), SHAPE, CONFIG, 0.0)
    assert (now.width, now.legal, now.attainable) == (2, (2, 3, 4), 4)
    even = CONFIG.model_copy(update={"multiple_of": 2})
    assert capacity_of(status(), SHAPE, even, 0.0).legal == (2, 4)


def test_a_rank_that_is_lost_is_no_gpu() -> None:
    assert capacity_of(status(lost=1), SHAPE, CONFIG, 0.0).attainable == 3


def test_a_slot_in_quarantine_counts_again_when_it_is_let_out() -> None:
    strikes = {"slot3": Strike(2, "CHECK failed", 100.0), "slot2/image": Strike(2, "bad", 100.0)}
    now = capacity_of(status(strikes=strikes), SHAPE, CONFIG, 200.0)
    assert (now.attainable, now.withheld) == (3, {"slot3": "CHECK failed"})
    assert now.until_s == 400.0
    later = capacity_of(status(strikes=strikes), SHAPE, CONFIG, 401.0)
    assert (later.attainable, later.withheld, later.until_s) == (4, {}, None)
