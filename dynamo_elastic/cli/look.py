"""What status and watch show: everything stored about a deployment, and this host's agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.agent.base import SlotStatus
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.records import AckRecord, CommandRecord, Keys, decode
from dynamo_elastic.coordinator.status import Status, status_of
from dynamo_elastic.coordinator.store import Versioned
from dynamo_elastic.errors import EngineError
from dynamo_elastic.phases import Step
from dynamo_elastic.report.history import History

_AGENT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The newest step of the operation under way: who was asked, and how many have answered."""

    step: Step
    asked: int
    answered: int


@dataclass(frozen=True, slots=True)
class Picture:
    """One look. `slots` is None, and `no_slots` says why, where the agent can't be asked."""

    deployment: str
    status: Status
    progress: StepProgress | None
    slots: tuple[SlotStatus, ...] | None
    no_slots: str
    report: Path | None
    """Of the last operation, if it is on this host."""
    now_s: float
    timeout_s: float
    """Of an operation."""


def progress_of(stored: Mapping[str, Versioned], keys: Keys, status: Status) -> StepProgress | None:
    """From the commands and acks in `stored`; None while nothing is under way."""
    if status.operation is None:
        return None
    commands = [
        decode(CommandRecord, v.value) for k, v in stored.items() if k.startswith(keys.commands)
    ]
    ours = [c for c in commands if c.operation_id == status.operation.operation_id]
    if not ours:
        return None
    newest = max(ours, key=lambda c: c.seq)
    acks = [decode(AckRecord, v.value) for k, v in stored.items() if k.startswith(keys.acks)]
    return StepProgress(
        newest.step,
        asked=sum(c.seq == newest.seq for c in ours),
        answered=sum((a.operation_id, a.seq) == (newest.operation_id, newest.seq) for a in acks),
    )


async def slots_of(agent: AgentClient) -> tuple[tuple[SlotStatus, ...] | None, str]:
    """The agent's slots, or None and why it does not say."""
    try:
        async with asyncio.timeout(_AGENT_TIMEOUT_S):
            return await agent.slots(), ""
    except TimeoutError:
        return None, f"the agent does not answer in {_AGENT_TIMEOUT_S:g} s"
    except EngineError as exc:
        return None, str(exc)


def picture(
    config: DeploymentConfig,
    stored: Mapping[str, Versioned],
    slots: tuple[tuple[SlotStatus, ...] | None, str],
    now_s: float,
) -> Picture:
    """What `stored` (everything under the deployment's prefix) and the agent say. Raises
    RecordError."""
    keys = Keys(config.deployment)
    status = status_of(stored.values(), keys)
    history = History(config.operations_dir, config.observe.keep_operations)
    return Picture(
        deployment=config.deployment,
        status=status,
        progress=progress_of(stored, keys, status),
        slots=slots[0],
        no_slots=slots[1],
        report=history.page_of(status.last.operation_id) if status.last else None,
        now_s=now_s,
        timeout_s=config.scale.operation_timeout_s,
    )
