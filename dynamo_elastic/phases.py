"""The phases of one scale operation: one table for code, docs, metrics and tests.

A phase is what an operator sees; a step is one command to one participant. The coordinator runs
the phases of a kind in order and, in each, its steps in order; `who` says which participants take
part. COMMIT begins with one transaction in etcd; participants see it there, and acknowledge to
SWITCH the switch that they then make. PUSH_EXPERTS stands for all rounds of topology.move_rounds():
each is INSTALL (the routing that spares what is overwritten), PUSH_EXPERTS to the sources, INSTALL
(the result). If nobody has switched when SWITCH ends, WITHDRAW makes sure that nobody will: the
decision is then superseded by the next operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dynamo_elastic.errors import IllegalTransition


class Kind(StrEnum):
    """What an operation does to the topology."""

    BOOT = "boot"
    UP = "up"
    DOWN = "down"
    REBALANCE = "rebalance"
    """Moves experts inside the epoch in force: what an UP could not finish."""


class Phase(StrEnum):
    """Where an operation stands."""

    PLAN = "plan"
    RESTORE = "restore"
    CONNECT = "connect"
    STREAM = "stream"
    CHECK = "check"
    DRAIN = "drain"
    REDISTRIBUTE = "redistribute"
    COMMIT = "commit"
    CANARY = "canary"
    SERVE = "serve"
    REBALANCE = "rebalance"
    DISCONNECT = "disconnect"
    PARK = "park"
    DONE = "done"
    ABORTING = "aborting"
    ABORTED = "aborted"


class Step(StrEnum):
    """One command to a participant."""

    FREEZE = "freeze"
    RESTORE = "restore"
    OPEN = "open"
    CONNECT = "connect"
    LOAD = "load"
    STREAM = "stream"
    CHECK = "check"
    DRAIN = "drain"
    PUSH_EXPERTS = "push_experts"
    INSTALL = "install"
    SWITCH = "switch"
    WITHDRAW = "withdraw"
    CANARY = "canary"
    SERVE = "serve"
    DISCONNECT = "disconnect"
    PARK = "park"
    THAW = "thaw"
    ABORT = "abort"


class Who(StrEnum):
    """Which participants a step is for."""

    RETAINED = "retained"
    JOINERS = "joiners"
    LOADERS = "loaders"
    """Joiners that hold experts from the start: in place of ranks that were lost with them."""
    LEAVERS = "leavers"
    """All that leave, lost ones too; in a boot, members of a topology that died."""
    LIVE_LEAVERS = "live_leavers"
    """Leavers that still serve."""
    NEXT = "next"
    """Members of the next topology: retained and joiners."""
    BEFORE = "before"
    """Members of the topology in force: retained and leavers."""
    PROBED = "probed"
    """Joiners, and what they are compared with: the lowest retained rank (in a boot, rank 0)."""


@dataclass(frozen=True, slots=True)
class PhaseSpec:
    """One row of the table."""

    phase: Phase
    steps: tuple[tuple[Step, Who], ...]
    what: str


_PLAN = PhaseSpec(
    Phase.PLAN,
    ((Step.FREEZE, Who.BEFORE),),
    "absolute target made legal; expert moves frozen until the end",
)
_RESTORE = PhaseSpec(
    Phase.RESTORE,
    ((Step.RESTORE, Who.JOINERS),),
    "joiners from parked, image or cold; each reports in",
)
_CONNECT = PhaseSpec(
    Phase.CONNECT,
    ((Step.OPEN, Who.NEXT), (Step.CONNECT, Who.NEXT)),
    "the next epoch's group connected, masked, while the old one serves",
)
_COMMIT = PhaseSpec(
    Phase.COMMIT,
    ((Step.SWITCH, Who.NEXT),),
    "decision durable in etcd, then the switch at one step boundary",
)
_CANARY = PhaseSpec(
    Phase.CANARY,
    ((Step.CANARY, Who.PROBED),),
    "each joiner answers a probe with the tokens of a retained rank",
)
_SERVE = PhaseSpec(
    Phase.SERVE,
    ((Step.SERVE, Who.JOINERS),),
    "its shell registers with Dynamo; the card is read back",
)

PHASES: dict[Kind, tuple[PhaseSpec, ...]] = {
    Kind.BOOT: (
        PhaseSpec(
            Phase.PLAN,
            ((Step.PARK, Who.LEAVERS),),
            "engines of a topology that can't serve any more are ended, if there was one",
        ),
        _RESTORE,
        _CONNECT,
        PhaseSpec(Phase.STREAM, ((Step.LOAD, Who.JOINERS),), "weights from the model directory"),
        _COMMIT,
        _CANARY,
        _SERVE,
    ),
    Kind.UP: (
        _PLAN,
        _RESTORE,
        _CONNECT,
        PhaseSpec(
            Phase.STREAM,
            ((Step.STREAM, Who.RETAINED), (Step.LOAD, Who.LOADERS)),
            "dense and replicated weights pushed by the retained ranks; lost experts from disk",
        ),
        PhaseSpec(
            Phase.CHECK,
            ((Step.CHECK, Who.PROBED),),
            "digests of every byte, masked probe against a retained rank",
        ),
        _COMMIT,
        _CANARY,
        _SERVE,
        PhaseSpec(
            Phase.REBALANCE,
            ((Step.PUSH_EXPERTS, Who.NEXT), (Step.THAW, Who.NEXT)),
            "experts copied to the new ranks in the background",
        ),
    ),
    Kind.DOWN: (
        _PLAN,
        PhaseSpec(
            Phase.DRAIN,
            ((Step.DRAIN, Who.LIVE_LEAVERS),),
            "leavers unregister; short requests finish, the others move",
        ),
        PhaseSpec(
            Phase.REDISTRIBUTE,
            ((Step.PUSH_EXPERTS, Who.BEFORE), (Step.OPEN, Who.NEXT), (Step.CONNECT, Who.NEXT)),
            "experts move off the leavers; the smaller group is connected, masked",
        ),
        _COMMIT,
        PhaseSpec(
            Phase.DISCONNECT,
            ((Step.DISCONNECT, Who.NEXT),),
            "every peer lets go of the leavers before they unmap",
        ),
        PhaseSpec(
            Phase.PARK,
            ((Step.PARK, Who.LEAVERS), (Step.THAW, Who.NEXT)),
            "leavers parked or ended; their GPUs are free",
        ),
    ),
    Kind.REBALANCE: (
        PhaseSpec(
            Phase.REBALANCE,
            ((Step.FREEZE, Who.NEXT), (Step.PUSH_EXPERTS, Who.NEXT), (Step.THAW, Who.NEXT)),
            "experts copied to where they were planned to be",
        ),
    ),
}
"""Phases of each kind, in order. Before COMMIT a failure aborts; from there only forward. A kind
without COMMIT decides nothing, so it has nothing to undo."""

TERMINAL = frozenset({Phase.DONE, Phase.ABORTED})


def phases_of(kind: Kind) -> tuple[Phase, ...]:
    """Phases of `kind` in order, without DONE and the aborting ones."""
    return tuple(spec.phase for spec in PHASES[kind])


def committed(kind: Kind, phase: Phase) -> bool:
    """True once an operation in `phase` may only go forward. Its record is in COMMIT only after the
    transaction that decides it."""
    if phase is Phase.DONE:
        return True
    order = phases_of(kind)
    if phase not in order:
        return False
    return Phase.COMMIT not in order or order.index(phase) >= order.index(Phase.COMMIT)


def check_move(kind: Kind, before: Phase, after: Phase) -> None:
    """Raise IllegalTransition unless an operation of `kind` may go from `before` to `after`.

    Legal moves: to the next phase of the table; to DONE from the last; to ABORTING from any phase
    before COMMIT; from ABORTING to ABORTED.
    """
    order = phases_of(kind)
    legal: set[Phase] = set()
    if before in order:
        at = order.index(before)
        legal.add(order[at + 1] if at + 1 < len(order) else Phase.DONE)
        if not committed(kind, before):
            legal.add(Phase.ABORTING)
    elif before is Phase.ABORTING:
        legal.add(Phase.ABORTED)
    if after not in legal:
        raise IllegalTransition(f"operation {kind}", before, after)
