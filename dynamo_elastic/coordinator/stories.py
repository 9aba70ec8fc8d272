"""An operation's story, made from its record and from the events of its timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from dynamo_elastic.coordinator.observe import EventName
from dynamo_elastic.coordinator.records import OperationRecord
from dynamo_elastic.phases import TERMINAL, Phase
from dynamo_elastic.report.story import Part, PhaseSpan, Role, StepOutcome, StepSpan, Story
from dynamo_elastic.report.traffic import WorkerTraffic
from dynamo_elastic.types import WorkerId


def story_of(
    record: OperationRecord,
    deployment: str,
    timeout_s: float,
    events: Iterable[Mapping[str, Any]] = (),
    traffic: tuple[WorkerTraffic, ...] = (),
    *,
    now_s: float | None = None,
) -> Story:
    """What is known of the operation of `record`: with the `events` of its timeline what every rank
    did when, without them how long each step took. One that is under way is told up to `now_s`."""
    plan, over = record.plan, record.phase in TERMINAL
    so_far_s = record.elapsed_s if over or now_s is None else max(0.0, now_s - record.opened_at_s)
    return Story(
        deployment=deployment,
        operation_id=record.operation_id,
        kind=record.kind,
        phase=record.phase,
        epoch=plan.after.epoch,
        source=record.source,
        request_id=record.request_id,
        ranks_before=plan.before.world_size,
        ranks_after=plan.after.world_size,
        opened_at_s=record.opened_at_s,
        elapsed_s=so_far_s,
        deadline_at_s=record.opened_at_s + timeout_s,
        parts=tuple(_parts(record)),
        phases=tuple(_phases(record)),
        steps=tuple(_steps(events)) or tuple(_steps_of_record(record)),
        traffic=traffic,
        failure=record.failure,
        lost=record.lost,
        safe_to_release=record.safe_to_release,
    )


def _parts(record: OperationRecord) -> Iterable[Part]:
    plan = record.plan
    roles = dict.fromkeys(plan.retained, Role.RETAINED) | dict.fromkeys(plan.joiners, Role.JOINER)
    for worker, role in (roles | dict.fromkeys(plan.leavers, Role.LEAVER)).items():
        topology = plan.before if role is Role.LEAVER else plan.after
        said = record.participants.get(WorkerId(worker), "")
        yield Part(worker, role, topology.rank_of(worker), said)


def _phases(record: OperationRecord) -> Iterable[PhaseSpan]:
    over = record.phase in TERMINAL
    for now, after in pairwise([*record.phases, None]):
        if now is None:
            return
        elapsed_s: float | None = now.elapsed_s
        if not now.elapsed_s:  # nobody saw it end
            ended_at_s = after.started_at_s if after else record.opened_at_s + record.elapsed_s
            elapsed_s = max(0.0, ended_at_s - now.started_at_s) if after or over else None
        failed = after is not None and after.phase is Phase.ABORTING
        yield PhaseSpan(now.phase, now.started_at_s, elapsed_s, failed, now.detail)


def _steps(events: Iterable[Mapping[str, Any]]) -> Iterable[StepSpan]:
    for event in events:
        if event["event"] != EventName.STEP:
            continue
        detail = event["detail"]
        for worker, said in detail["workers"].items():
            began_at_s, elapsed_s = _within(event, said)
            yield StepSpan(
                phase=event["phase"],
                step=detail["step"],
                worker=worker,
                began_at_s=began_at_s,
                elapsed_s=elapsed_s,
                outcome=StepOutcome(said["outcome"]),
                reason=said.get("reason", ""),
                facts=said.get("facts", {}),
            )


def _steps_of_record(record: OperationRecord) -> Iterable[StepSpan]:
    """Of steps that measured something: the last round of each, as long as its slowest rank."""
    for phase in record.phases:
        began_at_s = phase.started_at_s
        for name, said in phase.detail.items():
            if not isinstance(said, dict):
                continue
            elapsed_s = float(phase.detail.get(f"{name}_s", 0.0))
            for worker, facts in said.items():
                done = StepOutcome.DONE
                yield StepSpan(
                    phase.phase, name, worker, began_at_s, elapsed_s, done, facts=dict(facts)
                )


def _within(event: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[float, float]:
    """Beginning and length of a rank's step by our own clock: clocks of hosts differ, but the step
    was inside the time that we waited for it."""
    asked_at_s, waited_s = float(event["detail"]["asked_at_s"]), float(event["elapsed_s"])
    elapsed_s = min(float(said["elapsed_s"]), waited_s)
    latest_s = asked_at_s + waited_s - elapsed_s
    return min(max(float(said["began_at_s"]), asked_at_s), latest_s), elapsed_s
