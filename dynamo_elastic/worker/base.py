"""What a worker shell is made of: who it is, and its seams to everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo_elastic.agent.base import Agent
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.dynamo.base import Registrar
from dynamo_elastic.dynamo.registrations import Registrations
from dynamo_elastic.engine.base import Engine
from dynamo_elastic.types import WorkerId


@dataclass(frozen=True, slots=True)
class ShellParts:
    """The adapters of one shell. The shell owns none of them: its composition root closes them."""

    worker_id: WorkerId
    slot: int
    store: Store
    keys: Keys
    agent: Agent
    registrar: Registrar
    registrations: Registrations
    connect: Callable[[str], Engine]
    """Opens a client to the engine that listens on this socket; the shell closes it."""
