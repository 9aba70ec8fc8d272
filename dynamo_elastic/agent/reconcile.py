"""What an agent does at its start: adopt the engines that live, end and remove what is stale."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from dynamo_elastic.agent.host import Host
from dynamo_elastic.agent.image_source import ImageSource
from dynamo_elastic.agent.pool import Eviction
from dynamo_elastic.agent.records import (
    EngineRecord,
    ParkedRecord,
    clear,
    forget_attach,
    read_parked,
    read_record,
)
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.locks import remove_abandoned
from dynamo_elastic.snapshot.process import alive

_log = logging.getLogger(__name__)

Judge = Callable[[ParkedRecord], tuple[Eviction, str] | None]
"""Why a parked engine that lives must not be kept, as a kind and in words; None if it may."""


@dataclass(slots=True)
class Reconciled:
    """`adopted` by slot; `done` says what was ended or removed, one line each."""

    adopted: dict[int, EngineRecord | ParkedRecord] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    evicted: list[Eviction] = field(default_factory=list)


def reconcile(
    config: DeploymentConfig, host: Host, images: ImageSource, judge: Judge
) -> Reconciled:
    """The host is as its records say: every engine that was attached or parked and lives in our
    namespace is adopted, by pid and start time, and its image is held; all else that earlier agents
    left has ended or is removed. Raises EngineError if a process can't be ended."""
    found = Reconciled()
    for slot in _known_slots(config):
        control_dir = config.control_dir(slot)
        failpoint("agent.before_adopt")
        record, parked = read_record(control_dir), read_parked(control_dir)
        refusal = _refusal(record, parked, host, judge, wanted=slot < config.scale.max_ranks)
        last = record or parked
        if last is not None and not refusal:
            found.adopted[slot] = last
            forget_attach(control_dir)
            found.done += _hold_image(images, last)
            continue
        for one in (record, parked):
            if one is not None and alive(one.process):
                host.end_elsewhere(one.process)
        if last is not None:
            found.done.append(f"slot {slot}: {_name(last)} is not adopted: {refusal}")
        if parked is not None:
            verdict = judge(parked)
            found.evicted.append(verdict[0] if verdict else Eviction.DIED)
        clear(control_dir)
    keep = {record.process for record in found.adopted.values()}
    host.end_strays(frozenset(keep))
    found.done += [f"{path}: left by a dead process" for path in remove_abandoned()]
    found.done += _tidy_images(images)
    for line in found.done:
        _log.info("%s", line)
    return found


def _refusal(
    record: EngineRecord | None,
    parked: ParkedRecord | None,
    host: Host,
    judge: Judge,
    *,
    wanted: bool,
) -> str:
    """Why what was found in a slot is not adopted; '' if it is, or if there is nothing."""
    last = record or parked
    if last is None:
        return ""
    if not wanted:
        return "this deployment has no such slot"
    if record is not None and (parked is not None or not record.attached):
        return "it was between two states when its agent died"
    if not alive(last.process):
        return "it has ended"
    if not host.holds(last.process):
        return "it runs in another namespace than ours"
    verdict = judge(parked) if parked is not None else None
    return verdict[1] if verdict is not None else ""


def _name(record: EngineRecord | ParkedRecord) -> str:
    if isinstance(record, ParkedRecord):
        return "the parked engine"
    return f"engine {record.incarnation}"


def _known_slots(config: DeploymentConfig) -> list[int]:
    """The deployment's, and those of which an earlier, wider one left files."""
    parent = config.control_dir(0).parent
    found = {int(p.name) for p in parent.glob("*") if p.name.isdigit() and p.is_dir()}
    return sorted(found | set(range(config.scale.max_ranks)))


def _hold_image(images: ImageSource, record: EngineRecord | ParkedRecord) -> list[str]:
    if not record.image_id:
        return []
    try:
        images.hold(record.slot, record.image_id)
    except ElasticError as exc:
        return [f"slot {record.slot}: its image can't be held: {exc}"]
    return []


def _tidy_images(images: ImageSource) -> list[str]:
    try:
        return list(images.tidy())
    except ElasticError as exc:
        return [f"the catalog was not tidied: {exc}"]
