"""What an agent does at its start: adopt the engines that live, end and remove what is stale."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dynamo_elastic.agent.host import Host
from dynamo_elastic.agent.records import EngineRecord, clear, forget_attach, read_record
from dynamo_elastic.agent.start import ImageSource
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.snapshot.locks import remove_abandoned
from dynamo_elastic.snapshot.process import alive

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """`engines` by slot are adopted; `done` says what was ended or removed, one line each."""

    engines: dict[int, EngineRecord]
    done: tuple[str, ...]


def reconcile(config: DeploymentConfig, host: Host, images: ImageSource) -> Reconciled:
    """The host is as its records say: every engine that was attached and lives in our namespace is
    adopted, by pid and start time, and its image is held; all else that earlier agents left has
    ended or is removed. Raises EngineError if a process can't be ended."""
    engines: dict[int, EngineRecord] = {}
    done: list[str] = []
    for slot in _known_slots(config):
        record = read_record(config.control_dir(slot))
        wanted = slot < config.scale.max_ranks
        if record is not None and wanted and _may_adopt(record, host):
            engines[slot] = record
            forget_attach(config.control_dir(slot))
            done += _hold_image(images, record)
            continue
        if record is not None:
            if alive(record.process):
                host.end_elsewhere(record.process)
            done.append(f"slot {slot}: engine {record.incarnation} is not adopted")
        clear(config.control_dir(slot))
    host.end_strays(frozenset(record.process for record in engines.values()))
    done += [f"{path}: left by a dead process" for path in remove_abandoned()]
    done += _tidy_images(images)
    for line in done:
        _log.info("%s", line)
    return Reconciled(engines, tuple(done))


def _known_slots(config: DeploymentConfig) -> list[int]:
    """The deployment's, and those of which an earlier, wider one left files."""
    parent = config.control_dir(0).parent
    found = {int(p.name) for p in parent.glob("*") if p.name.isdigit() and p.is_dir()}
    return sorted(found | set(range(config.scale.max_ranks)))


def _may_adopt(record: EngineRecord, host: Host) -> bool:
    return record.attached and alive(record.process) and host.holds(record.process)


def _hold_image(images: ImageSource, record: EngineRecord) -> list[str]:
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
