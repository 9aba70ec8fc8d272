"""The seam between an engine and what computes its steps: the host here, a GPU in `gpu_device`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dynamo_elastic.comm.base import ExpertGroup, TransferAgent
from dynamo_elastic.comm.host_group import HostExpertGroup
from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.engine.launch import EngineSettings
from dynamo_elastic.engine.reference.experts import ExpertStep, LocalExperts
from dynamo_elastic.engine.reference.kv import KvCache
from dynamo_elastic.engine.reference.membership import Membership
from dynamo_elastic.engine.reference.model import Model, Row, Weights
from dynamo_elastic.engine.reference.store import HOST, Store
from dynamo_elastic.errors import EngineError
from dynamo_elastic.types import Epoch, Incarnation, Rank


@dataclass(frozen=True, slots=True)
class StepResult:
    """`logits` are those of the whole tile, float32. After `lost` a peer was masked in the step:
    nothing of it counts, and the same rows run again."""

    logits: NDArray[np.float32]
    lost: bool


class Executor(Protocol):
    """Steps of one life of an engine, and its place among the experts of its peers.

    adopt(), enter(), step() and keep_only() are called by the step loop's thread, the rest by the
    one that prepares epochs.
    """

    def group(self, epoch: Epoch, rank: Rank, world_size: int) -> ExpertGroup:
        """A group of `epoch` to connect; the caller closes it."""
        ...

    @property
    def kernels(self) -> Mapping[str, str]:
        """Which of several kernels it computes with, where that was a choice."""
        ...

    def adopt(self, kernels: Mapping[str, str]) -> None:
        """Compute with `kernels`, those of another rank, from now on; this one serves nobody.
        Raises EngineError if it can't."""
        ...

    def enter(self, group: ExpertGroup) -> None:
        """`group` is the one in force from now on; before its first round, so that no peer steps
        yet."""
        ...

    def step(self, rows: list[Row], membership: Membership) -> StepResult:
        """One step of the group of `membership` with `rows`, or with none, for the others' sake.
        What it writes into the KV cache is the same if it runs again."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """Computations under it run beside the steps, not in turn with them."""
        ...

    def keep_only(self, groups: Collection[ExpertGroup]) -> None:
        """Let go of every peer that is in none of `groups`."""
        ...

    def close(self) -> None:
        """Let go of all peers; each of them has let go of this rank, or is dead. Idempotent."""
        ...


class Device(Protocol):
    """What an engine process computes with, for all its lives."""

    @property
    def store(self) -> Store: ...

    def agent(self, incarnation: Incarnation, weights: Weights) -> TransferAgent:
        """A new agent, by which peers may write into `weights`; the caller closes it."""
        ...

    def warm_up(self) -> None:
        """Load what agents need; nothing of it stays but libraries."""
        ...

    def executor(self, model: Model, cache: KvCache, local: LocalExperts) -> Executor:
        """For one life. Raises EngineError if this process can't compute as it did."""
        ...

    @property
    def kernels(self) -> Mapping[str, str]:
        """As of the executors of this process; part of its images."""
        ...

    def held(self) -> dict[str, int]:
        """What nobody sees from outside that a GPU's memory can't be saved with: see REPORTED in
        snapshot/cuda_findings.py. {} without a GPU."""
        ...


class HostDevice:
    """The CPU: NIXL on host memory, experts over TCP."""

    store: Store = HOST

    def __init__(self, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s

    def agent(self, incarnation: Incarnation, weights: Weights) -> TransferAgent:
        return NixlAgent(incarnation)

    @property
    def kernels(self) -> Mapping[str, str]:
        return {}

    def warm_up(self) -> None:
        NixlAgent("warm-up").close()

    def held(self) -> dict[str, int]:
        return {}

    def executor(self, model: Model, cache: KvCache, local: LocalExperts) -> Executor:
        return HostExecutor(model, cache, local, peer_timeout_s=self._peer_timeout_s)


class HostExecutor:
    """An Executor on the CPU; all its peers are those of its groups."""

    def __init__(
        self, model: Model, cache: KvCache, local: LocalExperts, *, peer_timeout_s: float
    ) -> None:
        self._model = model
        self._cache = cache
        self._local = local
        self._peer_timeout_s = peer_timeout_s

    def group(self, epoch: Epoch, rank: Rank, world_size: int) -> ExpertGroup:
        return HostExpertGroup(epoch, rank, world_size)

    @property
    def kernels(self) -> Mapping[str, str]:
        return {}

    def adopt(self, kernels: Mapping[str, str]) -> None:
        if kernels:
            raise EngineError(f"an engine on the CPU has no kernels {sorted(kernels)}")

    def enter(self, group: ExpertGroup) -> None:
        """Nothing to do: a group is all that its steps need."""

    def step(self, rows: list[Row], membership: Membership) -> StepResult:
        group = membership.group
        masked = group.masked
        experts = ExpertStep(
            group, membership.placement, self._local, timeout_s=self._peer_timeout_s
        )
        logits = np.empty((0, 0), dtype=np.float32)
        if rows:
            logits = self._model.forward(rows, self._cache, experts).numpy()
        else:
            self._model.idle(experts)
        return StepResult(logits, experts.lost or group.masked != masked)

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def keep_only(self, groups: Collection[ExpertGroup]) -> None:
        """Nothing to do: a group that is closed lets go of its peers."""

    def close(self) -> None:
        """Nothing to do, likewise."""


def make_device(settings: EngineSettings) -> Device:
    """The device that `settings` name. Raises ResourceMissing if it is not there."""
    if settings.device == "cpu":
        return HostDevice(settings.peer_timeout_s)
    # Needs a GPU's libraries from its first line on.
    from dynamo_elastic.engine.reference.gpu_device import GpuDevice

    return GpuDevice(settings)
