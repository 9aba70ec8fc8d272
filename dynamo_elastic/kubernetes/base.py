"""The seam to Kubernetes: one graph (the planner's wish) and the pods of its elastic component.

Every write names the object that it was decided from: if that has changed meanwhile, nothing is
done and ClusterConflict says so. So each may be tried again after reading anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.types import WorkerId


class ClusterError(ElasticError):
    """The API server could not do what was asked."""


class ClusterUnavailable(ClusterError):
    """No answer, or none that can be used: a write may have taken effect. Read before retrying."""


class ClusterConflict(ClusterError):
    """The object has changed, is there already, or is gone: nothing was done. Read anew."""


class ClusterRefused(ClusterError):
    """Forbidden, or not valid: nothing was done, and asking again won't help until somebody
    changes roles or the pod template."""


class Role(StrEnum):
    """What a pod is for; a label of it."""

    HELD = "held"
    """Its worker serves, joins, leaves, or is kept to join: not to be deleted."""
    RELEASED = "released"
    """Safe to delete: its worker has no rank and is wanted no more."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of the component, as the API server told it."""

    name: str
    uid: str
    version: str
    """resourceVersion: what writes are guarded by."""
    slot: int
    role: Role = Role.HELD
    deleting: bool = False
    failed: bool = False
    """All its containers have ended, and none will be started again."""
    since_s: float = 0.0
    """Wall clock of when it was created or last became ready or unready."""
    trouble: str = ""
    """Why it does not run, '' if nothing is known."""

    @property
    def worker_id(self) -> WorkerId:
        """Of the worker shell that runs in it."""
        return WorkerId(f"slot{self.slot}")

    @property
    def live(self) -> bool:
        return not self.deleting and not self.failed


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the graph's status."""

    kind: str
    holds: bool
    reason: str
    message: str
    since_s: float = field(default=0.0, compare=False)
    """Wall clock of when it began, or ceased, to hold."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the planner and people are told in the graph's status."""

    generation: int
    """Of the spec that this is about."""
    allocated: int
    """Pods that exist and are not being deleted."""
    active: int
    """Ranks in force."""
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class GraphView:
    """The graph and its elastic component."""

    name: str
    uid: str
    version: str
    generation: int
    replicas: int
    """The wish, as it was written: perhaps not a legal width."""
    index: int = 0
    """Of the component, in the graph's list."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Pod template of the component."""
    report: Report | None = None
    """What was last reported; None if nothing that we can read."""
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything that is decided from. `cursor` is the adapter's own: where to watch from."""

    graph: GraphView
    pods: tuple[PodView, ...]
    cursor: tuple[str, str] = ("", "")


class Cluster(Protocol):
    """One component of one graph in one namespace. Every call has a deadline of its own."""

    async def read(self) -> ClusterView:
        """What there is now. Raises ClusterUnavailable, ClusterRefused, or ClusterConflict if the
        graph or the component does not exist."""
        ...

    async def changed(self, since: ClusterView) -> None:
        """Return once something differs from `since`, or may: none is missed. Raises
        ClusterUnavailable or ClusterRefused."""
        ...

    async def create_pod(self, graph: GraphView, slot: int) -> None:
        """A HELD pod for `slot`, owned by `graph`. At most one pod of a slot can exist."""
        ...

    async def set_role(self, pod: PodView, role: Role) -> None: ...

    async def delete_pod(self, pod: PodView) -> None:
        """Deletion begins, unless the pod has changed in any way since `pod` was read."""
        ...

    async def set_replicas(self, graph: GraphView, replicas: int) -> None:
        """Overwrite the wish, unless the graph has changed."""
        ...

    async def write_report(self, graph: GraphView, report: Report) -> None: ...

    async def close(self) -> None: ...
