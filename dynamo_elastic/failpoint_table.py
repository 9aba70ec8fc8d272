"""Every failpoint, and what must hold after each fault there: docs/reliability.md is made of it.

A failpoint stands in a stage of a process. What must hold depends on these two and on the fault,
not on the line of code. A test compares this table with the code, both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from dynamo_elastic.failpoints import Act
from dynamo_elastic.phases import PHASES, Kind, Phase, Step, committed


class Actor(StrEnum):
    """The process in which a failpoint stands."""

    COORDINATOR = "coordinator"
    SHELL = "worker shell"
    ENGINE = "engine"
    AGENT = "agent"
    IMAGER = "agent or command line"
    CONTROLLER = "Kubernetes controller"


class Stage(StrEnum):
    """What is under way there."""

    IDLE = "between operations"
    BEFORE = "before COMMIT"
    MOVES = "moving weights or experts"
    AFTER = "after COMMIT"
    UNDO = "undoing"
    SERVE = "serving"
    START = "starting an engine"
    PARK = "parking an engine"
    END = "ending an engine"
    ADOPT = "adopting engines"
    TAKE = "taking an image"
    STORE = "storing or moving an image"
    REMOVE = "removing an image"
    RESTORE = "restoring an image"
    FREEZE = "off the GPU"
    THAW = "back on the GPU"
    RECONCILE = "acting on pods"


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One named place."""

    name: str
    actor: Actor
    stage: Stage


_BEFORE = frozenset(
    {Step.FREEZE, Step.RESTORE, Step.OPEN, Step.CONNECT, Step.LOAD, Step.CHECK, Step.DRAIN}
)
_MOVES = frozenset({Step.STREAM, Step.PUSH_EXPERTS, Step.INSTALL})


def _stage(step: Step) -> Stage:
    if step is Step.ABORT:
        return Stage.UNDO
    if step in _MOVES:
        return Stage.MOVES
    return Stage.BEFORE if step in _BEFORE else Stage.AFTER


def _coordinator() -> Iterator[Failpoint]:
    for name in ("coordinator.elected", "coordinator.before_answer"):
        yield Failpoint(name, Actor.COORDINATOR, Stage.IDLE)
    for name in ("before_open", "before_recover", "closed"):
        yield Failpoint(f"scale.{name}", Actor.COORDINATOR, Stage.IDLE)
    yield Failpoint("scale.opened", Actor.COORDINATOR, Stage.BEFORE)
    phases = {p.phase: committed(kind, p.phase) for kind in Kind for p in PHASES[kind]}
    for phase, decided in phases.items():
        stage = Stage.AFTER if decided else Stage.BEFORE
        for when, at in (("before", Stage.BEFORE), ("after", Stage.AFTER)):
            deciding = phase is Phase.COMMIT
            yield Failpoint(f"scale.{when}_{phase}", Actor.COORDINATOR, at if deciding else stage)
    yield Failpoint("scale.before_withdraw", Actor.COORDINATOR, Stage.AFTER)
    yield Failpoint("scale.before_round", Actor.COORDINATOR, Stage.MOVES)
    for name in ("before_abort", "before_close"):
        yield Failpoint(f"scale.{name}", Actor.COORDINATOR, Stage.UNDO)
    for step in Step:
        yield Failpoint(f"scale.{step}.commanded", Actor.COORDINATOR, _stage(step))


def _shell() -> Iterator[Failpoint]:
    for step in Step:
        for at in ("begin", "end"):
            yield Failpoint(f"worker.{step}.{at}", Actor.SHELL, _stage(step))
    yield Failpoint("worker.decided", Actor.SHELL, Stage.AFTER)
    for name in (
        *("worker.resumes", "worker.settles", "worker.evicted"),
        *("registration.before_register", "registration.before_unregister"),
        *("registration.before_refresh", "registration.before_repair"),
        "registration.before_expel",
    ):
        yield Failpoint(name, Actor.SHELL, Stage.IDLE)


_FIXED: dict[tuple[Actor, Stage], str] = {
    (Actor.ENGINE, Stage.START): """
        engine.warm engine.attached engine.populated engine.proven memory.before_access buffer.made
        rebind.planned rebind.before_node graphs.before_check graphs.before_capture""",
    (Actor.ENGINE, Stage.SERVE): "engine.status engine.submit engine.cancel",
    (Actor.ENGINE, Stage.BEFORE): """
        engine.freeze engine.open_epoch engine.after_open engine.connect_epoch group.before_connect
        group.connected buffer.before_connect buffer.connected transfer.before_peer
        transfer.before_map engine.after_connect engine.load_weights engine.check engine.drain""",
    (Actor.ENGINE, Stage.MOVES): """
        engine.push_dense engine.push_experts engine.before_push weights.before_chunk weights.landed
        engine.install""",
    (Actor.ENGINE, Stage.AFTER): """
        engine.decide engine.wait_switched engine.before_switch engine.after_switch
        buffer.before_activate buffer.before_deactivate engine.before_first_step engine.canary
        engine.disconnect buffer.before_disconnect""",
    (Actor.ENGINE, Stage.UNDO): "engine.abort_epoch engine.readmit",
    (Actor.ENGINE, Stage.PARK): """
        engine.detach engine.detached buffer.before_destroy memory.before_discard""",
    (Actor.AGENT, Stage.START): """
        agent.before_start agent.engine_spawned agent.attached agent.engine_answered
        agent.before_unpark agent.unparked""",
    (Actor.AGENT, Stage.PARK): """
        agent.before_detach agent.engine_detached agent.engine_parked""",
    (Actor.AGENT, Stage.END): "agent.before_end agent.engine_ended",
    (Actor.AGENT, Stage.ADOPT): "agent.before_adopt",
    (Actor.IMAGER, Stage.TAKE): """
        take.boot take.inspect take.freeze take.frozen take.dump take.dumped take.store""",
    (Actor.IMAGER, Stage.STORE): """
        catalog.publish.begin catalog.publish.manifest_written catalog.publish.before_rename
        catalog.publish.renamed catalog.import.before_file catalog.import.extracted
        catalog.export.before_file""",
    (Actor.IMAGER, Stage.REMOVE): """
        catalog.remove.before_rename catalog.remove.renamed catalog.remove.deleted
        catalog.partials.before_removal""",
    (Actor.IMAGER, Stage.RESTORE): """
        restore.compare restore.verify restore.restore restore.thaw restore.before_thaw
        restore.before_fill restore.filled restore.thawed""",
    (Actor.IMAGER, Stage.FREEZE): "park.begin cuda.lock cuda.checkpoint park.frozen park.released",
    (Actor.IMAGER, Stage.THAW): "unpark.checked cuda.restore cuda.unlock",
    (Actor.CONTROLLER, Stage.RECONCILE): " ".join(
        f"kubernetes.{when}_{action}"
        for action in ("createpod", "setrole", "deletepod", "request", "correct")
        for when in ("before", "after")
    ),
}

FAILPOINTS: tuple[Failpoint, ...] = (
    *_coordinator(),
    *_shell(),
    *(
        Failpoint(name, actor, stage)
        for (actor, stage), names in _FIXED.items()
        for name in names.split()
    ),
)


@dataclass(frozen=True, slots=True)
class Holds:
    """What must hold after each fault at the failpoints of one stage."""

    kill: str
    stop: str
    error: str
    delay: str

    def after(self, act: Act) -> str:
        text: str = getattr(self, act.value)
        return text


_FENCED = "as a kill once its lease is out; what it sends when it wakes is refused by its token"
_LATER = "it is only later"
_LEADER_LATE = "it is only later; longer than the lease, as a stop"
_STEP_LATE = "it is only later; past the step's deadline, as an error"
_NO_ANSWER = "no answer by the step's deadline, or its lease runs out: as a kill"

HOLDS: dict[tuple[Actor, Stage], Holds] = {
    (Actor.COORDINATOR, Stage.IDLE): Holds(
        "the next leader acts on what is stored; nothing that was accepted is forgotten",
        _FENCED,
        "it gives up its leadership; whoever leads next acts on what is stored",
        _LEADER_LATE,
    ),
    (Actor.COORDINATOR, Stage.BEFORE): Holds(
        "the next leader undoes it: the topology before stays in force, joiners and their GPUs "
        "are free within 5 s, and the target is tried again",
        _FENCED,
        "as a kill, without the wait for its lease; an error of the ack's watch is made good",
        _LEADER_LATE,
    ),
    (Actor.COORDINATOR, Stage.MOVES): Holds(
        "before COMMIT the next leader undoes it; after it the moves end, and what is routed by "
        "is right, only not as even as planned",
        _FENCED,
        "as a kill, without the wait for its lease",
        _LEADER_LATE,
    ),
    (Actor.COORDINATOR, Stage.AFTER): Holds(
        "ranks switch without it; the next leader goes on from the stored phase to DONE, or "
        "withdraws a decision that nobody had switched to",
        _FENCED,
        "as a kill, without the wait for its lease",
        _LEADER_LATE,
    ),
    (Actor.COORDINATOR, Stage.UNDO): Holds(
        "the next leader ends it the same way: every undoing may be done twice",
        _FENCED,
        "as a kill, without the wait for its lease",
        _LEADER_LATE,
    ),
    (Actor.SHELL, Stage.IDLE): Holds(
        "a new shell claims the slot when the lease is out, and adopts the engine if that is in "
        "force, or ends it; the frontend sends its streams on",
        "back within 3 s of its lease's end it goes on as if nothing had been, else it is "
        "evicted, and gives its engine up when it wakes",
        "tried again after 0.5 s, until it is done",
        _LATER,
    ),
    (Actor.SHELL, Stage.BEFORE): Holds(
        "the operation aborts when the lease is out, and is tried again; a retained rank's engine "
        "serves on, and is adopted",
        _NO_ANSWER,
        "it answers so; the operation aborts at once, and is tried again",
        _STEP_LATE,
    ),
    (Actor.SHELL, Stage.MOVES): Holds(
        "before COMMIT the operation aborts; after it the moves end where they are",
        _NO_ANSWER,
        "it answers so: as a kill",
        _STEP_LATE,
    ),
    (Actor.SHELL, Stage.AFTER): Holds(
        "the operation ends without it: it is lost, evicted and replaced; the others switch and "
        "serve",
        _NO_ANSWER,
        "a joiner that has not proven itself is not served, and replaced; a leaver that could not "
        "be parked is ended",
        _STEP_LATE,
    ),
    (Actor.SHELL, Stage.UNDO): Holds(
        "asked twice; a member that does not undo is lost, evicted and replaced",
        _NO_ANSWER,
        "asked again; what is left is undone when its operation is gone from the store",
        _STEP_LATE,
    ),
    (Actor.ENGINE, Stage.SERVE): Holds(
        "peers throw the step at hand away and mask it; its streams go on elsewhere; it is "
        "evicted and replaced; requests wait while experts that nobody else holds are read again",
        "after engine.peer_timeout_s as a kill; when it wakes it finds itself masked, and leaves",
        "that call fails, and changes nothing; serving goes on",
        "the group waits for a step at most engine.peer_timeout_s; then as a stop",
    ),
    (Actor.ENGINE, Stage.START): Holds(
        "the agent ends what is left of it and falls a rung down the ladder, or answers with why",
        "not ready by the start's deadline: as a kill",
        "as a kill; a rebind that failed is captured again",
        "it is only later; past the start's deadline, as a kill",
    ),
    (Actor.ENGINE, Stage.BEFORE): Holds(
        "the operation aborts; a joiner is ended, a retained rank evicted and replaced as in "
        "serving; no other rank's group waits for it",
        "no answer by the step's deadline: as a kill",
        "the operation aborts at once; the groups in force step on, and the epoch's are closed",
        _STEP_LATE,
    ),
    (Actor.ENGINE, Stage.MOVES): Holds(
        "as before; half-written regions are never routed to: no digest, no route",
        "no answer by the step's deadline: as a kill",
        "before COMMIT the operation aborts; after it the moves end where they are",
        _STEP_LATE,
    ),
    (Actor.ENGINE, Stage.AFTER): Holds(
        "the others switch at one step boundary, all or none; it is lost, evicted and replaced; no "
        "token of the step in which it died is sent",
        "masked after engine.peer_timeout_s: as a kill",
        "in the step loop as a kill; in a call it is answered, and the rank is lost if it has not "
        "switched",
        "the switch waits for it; past engine.peer_timeout_s, as a stop",
    ),
    (Actor.ENGINE, Stage.UNDO): Holds(
        "it is lost, evicted and replaced",
        "asked twice, then as a kill",
        "asked again",
        _STEP_LATE,
    ),
    (Actor.ENGINE, Stage.PARK): Holds(
        "it is not parked: its slot is free, and the next start comes from an image",
        "not detached by its deadline: ended",
        "ended instead of parked, and why is said",
        "it is only later; past its deadline, ended",
    ),
    (Actor.AGENT, Stage.START): Holds(
        "its successor ends the engine that it had not recorded, and adopts all others; the "
        "operation asks again or aborts",
        "no engine by the deadline: the operation aborts; engines serve on",
        "that process is ended; the next rung is tried",
        "it is only later; past the deadline, the operation aborts",
    ),
    (Actor.AGENT, Stage.PARK): Holds(
        "its successor finds the engine between two states, and ends it; one that was recorded as "
        "parked stays parked",
        "the park is not answered in time; when it wakes it goes on, or ends it",
        "the engine is ended, and why it was not parked is said",
        _LATER,
    ),
    (Actor.AGENT, Stage.END): Holds(
        "its successor ends what is not to live, and adopts the others",
        "the slot is free when it wakes",
        "the caller is told, and asks again",
        _LATER,
    ),
    (Actor.AGENT, Stage.ADOPT): Holds(
        "its successor adopts anew: nothing is ended twice, nothing is lost",
        "engines serve on; starts wait",
        "it ends with the reason, and is started again",
        _LATER,
    ),
    (Actor.IMAGER, Stage.TAKE): Holds(
        "the process and its namespace end with us; there is no image; directories are removed by "
        "the next agent",
        "engines that live are not disturbed",
        "no process, mount, directory or part of an image is left",
        "it is only later; past its deadline, as an error",
    ),
    (Actor.IMAGER, Stage.STORE): Holds(
        "the image is there and whole, or not there; what is left is removed by the next tidying",
        "others wait at most for the catalog's lock, and say so",
        "the image is not there, or whole if it had its name already; nothing else of it is left, "
        "and the caller is told",
        _LATER,
    ),
    (Actor.IMAGER, Stage.REMOVE): Holds(
        "the image is there and whole, or no image any more; the rest goes with the next tidying",
        "others wait at most for the catalog's lock, and say so",
        "as a kill, and the caller is told",
        _LATER,
    ),
    (Actor.IMAGER, Stage.RESTORE): Holds(
        "the agent's successor ends what was restored; the image stays, unheld",
        "no engine by the deadline: the operation aborts",
        "nothing of it runs; the image is unheld, and counts towards quarantine if it is at fault",
        _STEP_LATE,
    ),
    (Actor.IMAGER, Stage.FREEZE): Holds(
        "a process between two states is ended by the agent's successor",
        "the park's deadline passes, and the engine is ended",
        "a process that was only locked runs on; any other is killed, and said to be lost",
        "it is only later; past its deadline, as an error",
    ),
    (Actor.IMAGER, Stage.THAW): Holds(
        "a process between two states is ended by the agent's successor",
        "the start's deadline passes, and the process is ended",
        "nothing is tried twice: those not back on their GPU are killed; the next rung is tried",
        "it is only later; past its deadline, as an error",
    ),
    (Actor.CONTROLLER, Stage.RECONCILE): Holds(
        "its successor reads the cluster and decides anew; no pod is made or deleted twice",
        "as a kill; the next one leads when the lease is out",
        "it reads the cluster and decides anew",
        _LATER,
    ),
}


def table() -> str:
    """The table in docs/reliability.md."""
    columns = ("process", "stage", "failpoints", *(act.value for act in Act))
    rows = [columns, ("---",) * len(columns)]
    for (actor, stage), holds in HOLDS.items():
        names = [f"`{f.name}`" for f in FAILPOINTS if (f.actor, f.stage) == (actor, stage)]
        rows.append((actor.value, stage.value, " ".join(names), *(holds.after(act) for act in Act)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
