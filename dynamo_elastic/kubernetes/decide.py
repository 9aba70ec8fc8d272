"""What is done next, from one view of pods and coordinator: a pure function.

Up: pods first, then the target. Down: the target first, then the pods of exactly those workers that
have left. A pod is released first and deleted in a later round, from a newer view; whoever needs
it meanwhile takes it back, and a deletion that was decided before that fails at the API server.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.records import MemberState, OutcomeStatus
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.coordinator.targets import succession
from dynamo_elastic.kubernetes.base import ClusterView, PodView, Role
from dynamo_elastic.topology import EngineShape, legal_width
from dynamo_elastic.types import WorkerId

SOURCE = "planner/kubernetes"
_SATISFIED = (OutcomeStatus.REACHED, OutcomeStatus.UNCHANGED)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is legal, and how long a pod may take to bring up its worker."""

    shape: EngineShape
    scale: ScaleConfig
    pod_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class View:
    """What is decided from. `status` was read after `cluster`."""

    cluster: ClusterView
    status: Status
    limits: Limits
    now_s: float

    @property
    def desired(self) -> int:
        """The legal width nearest to the wish."""
        return self.nearest(self.cluster.graph.replicas)

    def nearest(self, ranks: int) -> int:
        """The largest legal width up to `ranks`, or the smallest above."""
        scale = self.limits.scale
        return legal_width(ranks, self.limits.shape, scale.limits, scale.max_ranks)

    @property
    def request_id(self) -> str:
        """Names the wish: another one has another generation."""
        return f"kubernetes-{self.cluster.graph.uid}-{self.cluster.graph.generation}"

    @property
    def answer(self) -> OutcomeStatus | None:
        """What the coordinator said to this wish."""
        outcome = self.status.outcome
        named = outcome is not None and outcome.request_id == self.request_id
        return outcome.status if outcome is not None and named else None


@dataclass(frozen=True, slots=True)
class CreatePod:
    slot: int


@dataclass(frozen=True, slots=True)
class SetRole:
    pod: PodView
    role: Role
    why: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    pod: PodView


@dataclass(frozen=True, slots=True)
class Request:
    """Ask the coordinator for the width. Asking twice under one id is asking once."""

    ranks: int
    request_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class Correct:
    """Bring the wish to what can be had: the planner waits for exactly what it asked for."""

    replicas: int
    why: str


Action = CreatePod | SetRole | DeletePod | Request | Correct


def decide(view: View) -> tuple[Action, ...]:
    """What to do now; () if all is as wanted or something else has to happen first."""
    if view.cluster.graph.deleting:
        return ()  # its pods go with it
    return (*_roles(view), *_deletions(view), *_creations(view), *_wish(view))


def engaged(status: Status) -> frozenset[WorkerId]:
    """Workers that serve, or that an operation is about: their pods stay."""
    workers = {m.worker_id for m in status.members.values() if m.state is not MemberState.STANDBY}
    for topology in (status.topology, status.in_force):
        workers |= set(topology.worker_ids) if topology is not None else set()
    if (now := status.operation) is not None:
        workers |= {*now.plan.before.worker_ids, *now.plan.after.worker_ids}
        workers |= {*now.lost, *now.discarded}
    return frozenset(workers)


def overdue(view: View, pod: PodView) -> bool:
    """True if the pod has had its time and no worker of it is there."""
    late = view.now_s - pod.since_s > view.limits.pod_timeout_s
    return late and pod.worker_id not in view.status.members


def wanted_pods(view: View) -> int:
    """How many pods there shall be. The coordinator boots with a width of its own, also if so many
    ranks are lost that it has to start anew."""
    booting = view.status.in_force is None or view.status.lost_reasons()
    return max(view.desired, view.limits.scale.initial_ranks if booting else 0)


def settled(view: View) -> bool:
    """True if the coordinator has done what this wish asks for, and does nothing else."""
    quiet = view.status.operation is None and not view.status.lost_reasons()
    return quiet and view.answer in _SATISFIED and view.status.width == view.desired


def _usable(view: View) -> list[PodView]:
    """Pods that have a worker, or may still come to have one."""
    return [p for p in view.cluster.pods if p.live and not overdue(view, p)]


def _dead(view: View, pod: PodView) -> bool:
    """True if nothing runs in the pod, and nothing will."""
    return pod.failed and pod.worker_id not in view.status.members


def _surplus(view: View) -> dict[str, str]:
    """Pods that can go, by name -> why."""
    busy = engaged(view.status)
    going = {p.name: "it has ended" for p in view.cluster.pods if _dead(view, p)}
    for pod in view.cluster.pods:
        if pod.live and pod.worker_id not in busy and overdue(view, pod):
            going[pod.name] = f"no worker after {view.limits.pod_timeout_s:g} s: {pod.trouble}"
    if settled(view):
        usable = _usable(view)
        free = sorted(
            (p for p in usable if p.worker_id not in busy), key=lambda p: (p.role, p.slot)
        )
        for pod in free[len(free) - max(0, len(usable) - view.desired) :]:
            going[pod.name] = f"{view.desired} ranks are wanted, it has none"
    return going


def _roles(view: View) -> list[Action]:
    """Release what can go, take back what is needed again."""
    going = _surplus(view)
    actions: list[Action] = []
    for pod in view.cluster.pods:
        role = Role.RELEASED if pod.name in going else Role.HELD
        if not pod.deleting and pod.role is not role:
            actions.append(SetRole(pod, role, going.get(pod.name, "it is needed")))
    return actions


def _deletions(view: View) -> list[Action]:
    going = _surplus(view)
    released = (p for p in view.cluster.pods if p.role is Role.RELEASED and not p.deleting)
    return [DeletePod(p) for p in released if p.name in going]


def _creations(view: View) -> list[Action]:
    """As many pods as are missing, in slots that have none; where a rank was lost, last."""
    missing = wanted_pods(view) - len(_usable(view))
    taken = {p.slot for p in view.cluster.pods}
    lost = {int(w.removeprefix("slot")) for w in engaged(view.status)}
    free = sorted(set(range(view.limits.scale.max_ranks)) - taken, key=lambda s: (s in lost, s))
    return [CreatePod(slot) for slot in free[: max(0, missing)]]


def _wish(view: View) -> list[Action]:
    """Ask for the width once it can be had; say what can be had instead if it can't."""
    if view.status.in_force is None:
        return []  # the coordinator boots by itself
    if (instead := _instead(view)) is not None:
        return [instead]
    if _asked(view) or not _ready(view):
        return []
    detail = f"generation {view.cluster.graph.generation}"
    return [Request(view.desired, view.request_id, detail)]


def _asked(view: View) -> bool:
    target = view.status.target
    if target is None:
        return False
    return view.request_id in (target.request_id, *(t.request_id for t in target.supersedes))


def _joinable(view: View) -> int:
    """Workers on standby in pods that stay."""
    standby = set(view.status.standby())
    return sum(p.live and p.role is Role.HELD and p.worker_id in standby for p in view.cluster.pods)


def _ready(view: View) -> bool:
    """True if the coordinator can act on the wish, and can pick nobody whose pod goes."""
    if view.desired <= view.status.width:
        return True
    joinable = _joinable(view)
    return joinable == len(view.status.standby()) and view.status.width + joinable >= view.desired


def _instead(view: View) -> Correct | None:
    """The wish made legal; the newer one of somebody else; or, if it was never reached and can't
    be, what is there."""
    graph, status = view.cluster.graph, view.status
    if graph.replicas != view.desired:
        return Correct(view.desired, f"{graph.replicas} ranks are not legal")
    target, outcome = status.target, status.outcome
    if target is not None and _asked(view) and target.request_id != view.request_id:
        return _correct(view, target.ranks, succession(target))
    if outcome is not None and view.answer in (OutcomeStatus.REFUSED, OutcomeStatus.FAILED):
        return _correct(view, status.width, outcome.reason)
    late = [p for p in view.cluster.pods if overdue(view, p)]
    if late and view.desired > status.width and view.answer is None:
        there = status.width + _joinable(view)
        why = f"no worker in time in {', '.join(f'{p.name} ({p.trouble})' for p in late)}"
        return _correct(view, view.nearest(there), why) if view.nearest(there) <= there else None
    return None


def _correct(view: View, replicas: int, why: str) -> Correct | None:
    return Correct(replicas, why) if replicas != view.desired else None
