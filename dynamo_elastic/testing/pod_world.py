"""Pods, worker shells and a coordinator without processes: the coordinator decides as the real one
does (its own decide()), and an operation takes as many moves as a test gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.decide import Answer, Operate, decide, wanted
from dynamo_elastic.coordinator.records import (
    MemberRecord,
    MemberState,
    OperationRecord,
    OutcomeStatus,
    TargetOutcome,
    TargetRecord,
)
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.kubernetes.base import ClusterConflict, ClusterView, PodView
from dynamo_elastic.kubernetes.decide import (
    SOURCE,
    Action,
    Correct,
    CreatePod,
    DeletePod,
    Limits,
    Request,
    SetRole,
    View,
    engaged,
)
from dynamo_elastic.kubernetes.decide import decide as decide_pods
from dynamo_elastic.phases import Phase
from dynamo_elastic.testing.cluster import FakeCluster
from dynamo_elastic.topology import EngineShape, Topology
from dynamo_elastic.types import FencingToken, Incarnation, OperationId, WorkerId

SHAPE = EngineShape(num_experts=4, slots_per_rank=4)
SCALE = ScaleConfig(initial_ranks=2, min_ranks=1, max_ranks=5, slots_timeout_s=60)
LIMITS = Limits(SHAPE, SCALE, pod_timeout_s=30)


class ActiveRankDeleted(AssertionError):
    """The one thing that must not happen."""


class World:
    """One deployment. Time is a number that the test moves."""

    def __init__(self, wish: int, limits: Limits = LIMITS) -> None:
        self.now_s = 1000.0
        self.limits = limits
        self.cluster = FakeCluster(wish, now=lambda: self.now_s)
        self.status = Status()
        self._lives = 0

    # The controller.

    def view(self, cluster: ClusterView | None = None) -> View:
        return View(cluster or self.cluster.view(), self.status, self.limits, self.now_s)

    def round(self, view: View | None = None) -> tuple[Action, ...]:
        """One round of the controller, or what one does that was stopped after it read `view`."""
        actions = decide_pods(view or self.view())
        for action in actions:
            self.apply(action, view or self.view())
        return actions

    def apply(self, action: Action, view: View) -> None:
        """Do it, or nothing if it was decided from something that has changed."""
        try:
            self._apply(action, view)
        except ClusterConflict:
            return

    def _apply(self, action: Action, view: View) -> None:
        match action:
            case CreatePod(slot):
                self.cluster.create(slot)
            case SetRole(pod, role, _):
                self._guard(pod)
                self.cluster.update(pod, role=role)
            case DeletePod(pod):
                self._guard(pod)
                self._check(pod)
                self.cluster.update(pod, deleting=True)
            case Request(ranks, request_id, detail):
                known = self.status.target
                ids = {t.request_id for t in known.supersedes} | {known.request_id} if known else ()
                if request_id not in ids:
                    self._target(TargetRecord(request_id, ranks, SOURCE, self.now_s, detail))
            case Correct(replicas, _):
                if self.cluster.graph.version == view.cluster.graph.version:
                    self.cluster.wish(replicas)

    def _guard(self, pod: PodView) -> None:
        known = self.cluster.pods.get(pod.name)
        if known is None or known.version != pod.version:
            raise ClusterConflict(pod.name)

    def _check(self, pod: PodView) -> None:
        if pod.worker_id in engaged(self.status) and pod.worker_id in self.status.members:
            raise ActiveRankDeleted(pod.name)

    def _target(self, target: TargetRecord) -> None:
        self.status = replace(self.status, target=target)

    # The kubelet and the worker shells.

    def start(self, pod: PodView) -> None:
        """The pod's worker shell is there, on standby."""
        if pod.live and pod.worker_id not in self.status.members:
            self._member(pod.worker_id, pod.slot, MemberState.STANDBY, Incarnation(""))

    def crash(self, worker: WorkerId) -> None:
        """Shell and engine are gone, and the lease has run out."""
        members = {w: m for w, m in self.status.members.items() if w != worker}
        self.status = replace(self.status, members=members)

    def end(self, pod: PodView) -> None:
        """A pod that is being deleted is gone, and its worker with it."""
        self.crash(pod.worker_id)
        self.cluster.remove(pod.name)

    def _member(
        self, worker: WorkerId, slot: int, state: MemberState, incarnation: Incarnation
    ) -> None:
        record = MemberRecord(worker, slot, "node", 1, state, incarnation)
        self.status = replace(self.status, members={**self.status.members, worker: record})

    # The coordinator.

    def coordinate(self) -> bool:
        """One move of the coordinator: open, commit or end an operation, or answer a target.
        False if it waits."""
        now = self.status.operation
        if now is None:
            return self._open()
        if now.phase is Phase.PLAN:
            self._commit(now)
        else:
            self._finish(now)
        return True

    def _open(self) -> bool:
        action = decide(self.status, self.limits.shape, self.limits.scale, self.now_s)
        if isinstance(action, Answer):
            self.status = replace(self.status, outcome=action.outcome)
            if action.restore:
                self._target(
                    replace(wanted(self.status, self.limits.scale), ranks=self.status.width)
                )
        if not isinstance(action, Operate):
            return isinstance(action, Answer)
        plan = action.request.plan
        self._lives += 1
        for worker in plan.joiners:
            name = Incarnation(f"{worker}-{self._lives}")
            slot = self.status.members[worker].slot
            self._member(worker, slot, MemberState.JOINING, name)
        now = OperationRecord(
            OperationId(f"op{self._lives}"),
            plan.kind,
            plan,
            Phase.PLAN,
            action.request.source,
            action.request.request_id,
            FencingToken(1),
            0,
            self.now_s,
            lost=action.request.lost,
            discarded=action.request.discarded,
        )
        self.status = replace(self.status, operation=now, epoch=plan.after.epoch)
        return True

    def _commit(self, now: OperationRecord) -> None:
        if any(w not in self.status.members for w in now.plan.joiners):
            self._close(replace(now, phase=Phase.ABORTED), now.plan.joiners)
            return
        lives = {m.worker_id: m.incarnation for m in now.plan.before.members}
        lives |= {w: self.status.members[w].incarnation for w in now.plan.joiners}
        self.status = replace(
            self.status,
            topology=_lived(now.plan.after, lives),
            operation=replace(now, phase=Phase.COMMIT),
        )

    def _finish(self, now: OperationRecord) -> None:
        made = self.status.topology or now.plan.after
        lives = {m.worker_id: m.incarnation for m in made.members}
        self.status = replace(self.status, topology=_lived(now.plan.settled, lives))
        for worker, incarnation in lives.items():
            record = self.status.members.get(worker)
            if record is not None and record.incarnation == incarnation:
                self._member(worker, record.slot, MemberState.SERVING, incarnation)
        self._close(replace(now, phase=Phase.DONE), now.plan.leavers)
        if now.request_id:
            outcome = TargetOutcome(
                now.request_id, now.plan.after.world_size, OutcomeStatus.REACHED
            )
            self.status = replace(self.status, outcome=outcome)

    def _close(self, now: OperationRecord, idle: tuple[WorkerId, ...]) -> None:
        for worker in idle:
            if (record := self.status.members.get(worker)) is not None:
                self._member(worker, record.slot, MemberState.STANDBY, Incarnation(""))
        self.status = replace(self.status, operation=None, last=now)

    # All of them.

    def turn(self, broken: frozenset[int] = frozenset()) -> bool:
        """Everybody does once what he can; False if nobody has anything to do. Pods of the slots in
        `broken` never come up."""
        acted = bool(self.round())
        for pod in list(self.cluster.pods.values()):
            if pod.deleting:
                self.end(pod)
            elif pod.live and pod.slot not in broken and pod.worker_id not in self.status.members:
                self.start(pod)
            else:
                continue
            acted = True
        return self.coordinate() or acted

    def settle(self, *, broken: frozenset[int] = frozenset(), turns: int = 200) -> None:
        """Take turns until nobody has anything to do."""
        for _ in range(turns):
            if not self.turn(broken) and not self._late():
                return
        raise AssertionError("it never settles")

    def _late(self) -> bool:
        """Let time pass if a pod is waited for."""
        waiting = [p for p in self.cluster.pods.values() if p.worker_id not in self.status.members]
        self.now_s += self.limits.pod_timeout_s + 1 if waiting else 0
        return bool(waiting)


def _lived(topology: Topology, lives: Mapping[WorkerId, Incarnation]) -> Topology:
    """`topology` with the engines that its ranks have."""
    members = (replace(m, incarnation=lives[m.worker_id]) for m in topology.members)
    return replace(topology, members=tuple(members))
