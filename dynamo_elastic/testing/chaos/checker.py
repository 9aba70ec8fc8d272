"""What must hold in every history, whatever went wrong. Pure.

The model is small: one leader at a time, whose token every write of an operation carries; one
operation at a time, whose phases follow phases.PHASES; a topology that only its COMMIT changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeVar

from dynamo_elastic.coordinator.records import (
    CommandRecord,
    Keys,
    OperationRecord,
    OutcomeStatus,
    RecordError,
    TargetOutcome,
    decode,
)
from dynamo_elastic.errors import IllegalTransition
from dynamo_elastic.phases import TERMINAL, Kind, Phase, check_move, committed
from dynamo_elastic.testing.chaos.history import Answer, History, Seen, Write, transactions
from dynamo_elastic.topology import Topology

T = TypeVar("T")


class Rule(StrEnum):
    """Everything that may be violated."""

    TOPOLOGY = "topology changes only by committed operations"
    EPOCH = "epochs strictly rise"
    ONE_TOPOLOGY = "no two topologies serve at once"
    STALE_TOKEN = "a stale token never writes"
    ONE_OPERATION = "one operation at a time, by the phase table"
    TOKENS = "an accepted request gets exactly its tokens, or an error"
    LOST = "no request is lost"
    SILENCE = "tokens come again within the window"
    RECORD = "every record can be read"


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule that did not hold, and what was seen."""

    rule: Rule
    what: str


@dataclass(frozen=True, slots=True)
class Windows:
    """How long what may be."""

    two_topologies_s: float
    """Engines serve two epochs: the switch of one step, and the eviction of a rank that hangs."""
    silence_s: float
    """No client gets a token."""


RETRYABLE = ("HTTP 429", "HTTP 503", "HTTP 529", "'code': 503", "retry")
"""An error that says one of these may be sent again."""

NOBODY = "HTTP 404"
"""No instance is known to the frontend. Nothing was begun; a documented window as a group boots."""
_SEEN_AGAIN_S = 1.0
"""In which a frontend sees the instances of a group that has booted."""


def check(history: History, windows: Windows) -> list[Violation]:
    """Every violation in `history`."""
    return [
        *check_writes(history),
        *check_serving(history, windows.two_topologies_s),
        *check_answers(history),
        *check_silence(history.answers, windows.silence_s),
    ]


def check_writes(history: History) -> list[Violation]:
    """The control plane: leader, operation, epoch and topology, transaction by transaction."""
    model = _Model(Keys(history.prefix.rstrip("/").rpartition("/")[2]))
    for write in history.before:
        model.begin_with(write)
    for transaction in transactions(history.writes):
        model.apply(transaction)
    return model.violations


class _Model:
    """What is stored, as the rules allow it to be."""

    def __init__(self, keys: Keys) -> None:
        self.violations: list[Violation] = []
        self._keys = keys
        self._token = 0  # of the leader; 0: nobody leads
        self._operation: OperationRecord | None = None
        self._topology: Topology | None = None
        self._topology_revision = 0
        self._epoch = 0

    def begin_with(self, write: Write) -> None:
        """What `write` stored is there, and nobody asks why."""
        self._take({write.key: write.value}, write.revision)

    def apply(self, transaction: Sequence[Write]) -> None:
        """Judge one transaction, then take it in."""
        values = {w.key: w.value for w in transaction}
        revision = transaction[0].revision
        try:
            self._judge(values, revision)
            self._take(values, revision)
        except RecordError as exc:
            self._violated(Rule.RECORD, f"revision {revision}: {exc}")

    def _violated(self, rule: Rule, what: str) -> None:
        self.violations.append(Violation(rule, what))

    def _judge(self, values: Mapping[str, bytes | None], revision: int) -> None:
        keys = self._keys
        self._owned(values, revision)
        operation = _read(OperationRecord, values, keys.operation)
        last = _read(OperationRecord, values, keys.last)
        if last is not None:
            self._tokens(last.token, f"end of {last.operation_id}", revision)
            self._closed(last, values, revision)
        if operation is not None:
            self._tokens(operation.token, f"{operation.operation_id} {operation.phase}", revision)
            self._moved(operation, values, revision)
        topology = _read(Topology, values, keys.topology)
        if topology is not None:
            self._topology_written(topology, operation, last, revision)
        self._reached(_read(TargetOutcome, values, keys.outcome), last)
        used = _read(int, values, keys.epoch)
        if used is not None and used < self._epoch:
            self._violated(Rule.EPOCH, f"epoch {used} was used after {self._epoch}")

    def _owned(self, values: Mapping[str, bytes | None], revision: int) -> None:
        """What only a leader may write."""
        keys = self._keys
        singles = {keys.operation, keys.topology, keys.epoch, keys.last, keys.outcome}
        singles |= {keys.notice, keys.capacity}
        puts = [k for k, v in values.items() if v is not None]
        owned = [k for k in puts if k in singles or k.startswith(keys.commands)]
        if owned and not self._token:
            self._violated(Rule.STALE_TOKEN, f"revision {revision}: {owned} while nobody leads")
        for key in puts:
            if key.startswith(keys.commands):
                command = decode(CommandRecord, values[key] or b"")
                self._tokens(command.token, f"command {command.step}", revision)

    def _tokens(self, token: int, what: str, revision: int) -> None:
        if token != self._token:
            self._violated(
                Rule.STALE_TOKEN,
                f"revision {revision}: {what} carries token {token}, the leader has {self._token}",
            )

    def _moved(
        self, new: OperationRecord, values: Mapping[str, bytes | None], revision: int
    ) -> None:
        """A new operation, or the next phase of the one under way."""
        old = self._operation
        if old is None:
            self._opened(new, values, revision)
        elif old.operation_id != new.operation_id:
            what = f"{new.operation_id} while {old.operation_id} is in {old.phase}"
            self._violated(Rule.ONE_OPERATION, f"revision {revision}: {what}")
        elif old.phase is not new.phase:
            self._move(new.kind, old.phase, new, revision)

    def _move(self, kind: Kind, before: Phase, new: OperationRecord, revision: int) -> None:
        try:
            check_move(kind, before, new.phase)
        except IllegalTransition as exc:
            what = f"revision {revision}: {new.operation_id}: {exc}"
            self._violated(Rule.ONE_OPERATION, what)

    def _opened(
        self, new: OperationRecord, values: Mapping[str, bytes | None], revision: int
    ) -> None:
        used = _read(int, values, self._keys.epoch)
        wanted = int(new.plan.after.epoch)
        stays = new.kind is Kind.REBALANCE and self._topology is not None
        if stays and self._topology is not None and wanted != self._topology.epoch:
            self._violated(Rule.EPOCH, f"{new.operation_id} moves experts of epoch {wanted}")
        elif not stays and (used != wanted or wanted <= self._epoch):
            what = f"revision {revision}: epoch {wanted} was opened after {self._epoch}"
            self._violated(Rule.EPOCH, what)

    def _closed(
        self, last: OperationRecord, values: Mapping[str, bytes | None], revision: int
    ) -> None:
        old = self._operation
        ended = self._keys.operation in values and values[self._keys.operation] is None
        if old is None or old.operation_id != last.operation_id or not ended:
            what = f"{last.operation_id} ended, but was not the one under way"
            self._violated(Rule.ONE_OPERATION, f"revision {revision}: {what}")
        elif last.phase not in TERMINAL:
            self._violated(Rule.ONE_OPERATION, f"{last.operation_id} ended in {last.phase}")
        else:
            self._move(old.kind, old.phase, last, revision)

    def _topology_written(
        self,
        new: Topology,
        operation: OperationRecord | None,
        last: OperationRecord | None,
        revision: int,
    ) -> None:
        old, record = self._topology, operation or last
        if record is None:
            what = f"epoch {new.epoch} was written without an operation"
        elif old is not None and new.epoch == old.epoch:
            if new.worker_ids == old.worker_ids and last is not None:
                return  # where the experts of this epoch are by now
            what = f"epoch {new.epoch} was changed inside of it"
        elif old is not None and new.epoch < old.epoch:
            self._violated(Rule.EPOCH, f"topology went from epoch {old.epoch} to {new.epoch}")
            return
        elif operation is None or operation.phase is not Phase.COMMIT:
            what = f"epoch {new.epoch} was written in {record.phase}"
        elif self._operation is not None and committed(operation.kind, self._operation.phase):
            what = f"epoch {new.epoch} was decided twice"
        elif operation.plan.after != new or operation.topology_revision != self._topology_revision:
            what = f"epoch {new.epoch} is not what was planned from the topology before it"
        else:
            return
        self._violated(Rule.TOPOLOGY, f"revision {revision}: {what}")

    def _reached(self, outcome: TargetOutcome | None, last: OperationRecord | None) -> None:
        """Who is told that a width was reached is told so by the operation that made it."""
        if outcome is None or outcome.status is not OutcomeStatus.REACHED or last is None:
            return
        if last.phase is not Phase.DONE or last.plan.after.world_size != outcome.ranks:
            what = f"{outcome.request_id} was told of {outcome.ranks} ranks at {last.phase}"
            self._violated(Rule.TOPOLOGY, what)

    def _take(self, values: Mapping[str, bytes | None], revision: int) -> None:
        keys = self._keys
        if keys.leader in values:
            self._token = revision if values[keys.leader] is not None else 0
        if keys.operation in values:
            self._operation = _read(OperationRecord, values, keys.operation)
        if keys.topology in values:
            self._topology = _read(Topology, values, keys.topology)
            self._topology_revision = revision if self._topology is not None else 0
        self._epoch = _read(int, values, keys.epoch) or self._epoch


def _read(kind: type[T], values: Mapping[str, bytes | None], key: str) -> T | None:
    raw = values.get(key)
    return decode(kind, raw) if raw is not None else None


def check_serving(history: History, window_s: float) -> list[Violation]:
    """Engines serve decided epochs only, and one at a time but for a while."""
    return [*_undecided(history), *_two_at_once(history.seen, window_s)]


def _epochs(values: Iterable[bytes | None]) -> set[int]:
    """Those of the topologies that can be read."""
    found = set()
    for value in values:
        if value:
            with suppress(RecordError):
                found.add(int(decode(Topology, value).epoch))
    return found


def _undecided(history: History) -> Iterable[Violation]:
    key, seen = f"{history.prefix}topology", history.seen
    before = _epochs(w.value for w in history.before if w.key == key)
    decided = before | _epochs(w.value for w in history.writes if w.key == key)
    # Of what was decided before the history begins only the last is known: a rank may be late.
    known_from = max(before, default=0)
    for epoch in sorted({s.epoch for s in seen if s.serving and s.epoch > known_from} - decided):
        worker = next(s.worker for s in seen if s.serving and s.epoch == epoch)
        what = f"{worker} serves epoch {epoch}, which was never decided"
        yield Violation(Rule.TOPOLOGY, what)


def _two_at_once(seen: Sequence[Seen], window_s: float) -> Iterable[Violation]:
    rounds: dict[int, list[Seen]] = {}
    for one in seen:
        rounds.setdefault(one.round_, []).append(one)
    since_s: float | None = None
    for said in rounds.values():
        epochs = {s.epoch for s in said if s.serving}
        if len(epochs) < 2:
            since_s = None
            continue
        at_s = said[0].at_s
        since_s = at_s if since_s is None else since_s
        if at_s - since_s > window_s:
            what = f"epochs {sorted(epochs)} serve for {at_s - since_s:.1f} s"
            yield Violation(Rule.ONE_TOPOLOGY, what)
            return


def check_answers(history: History) -> list[Violation]:
    """Every client got the right tokens, to the end or until an error."""
    found = []
    boots = list(_boots(history))
    for answer in history.answers:
        right = history.reference.get(answer.prompt)
        if right is None:
            found.append(Violation(Rule.TOKENS, f"{answer.prompt} has no reference"))
        elif answer.error and not right.startswith(answer.text):
            what = f"{answer.prompt}: {answer.text!r}, then {answer.error}"
            found.append(Violation(Rule.TOKENS, what))
        elif not answer.error and answer.text != right:
            what = f"{answer.prompt}: {answer.text!r} instead of {right!r}"
            found.append(Violation(Rule.TOKENS, what))
        if _lost(answer, boots):
            found.append(Violation(Rule.LOST, f"{answer.prompt}: {answer.error}"))
    return found


def lost(history: History) -> int:
    """Requests that ended with an error that does not say that they may be sent again."""
    boots = list(_boots(history))
    return sum(_lost(answer, boots) for answer in history.answers)


def _lost(answer: Answer, boots: Sequence[tuple[float, float]]) -> bool:
    if not answer.error or any(sign in answer.error for sign in RETRYABLE):
        return False
    booting = any(begin <= answer.started_s <= end + _SEEN_AGAIN_S for begin, end in boots)
    return not (booting and answer.error.startswith(NOBODY))


def _boots(history: History) -> Iterable[tuple[float, float]]:
    """When a group that nobody was left of was made anew: then there is no instance."""
    begin_s: float | None = None
    for write in (*history.before, *history.writes):
        if write.key != f"{history.prefix}operation":
            continue
        if write.value is None:
            if begin_s is not None:
                yield begin_s, write.at_s
            begin_s = None
            continue
        with suppress(RecordError):  # of which check_writes() tells
            if begin_s is None and decode(OperationRecord, write.value).kind is Kind.BOOT:
                begin_s = write.at_s
    if begin_s is not None:
        yield begin_s, math.inf


def longest_silence_s(answers: Sequence[Answer]) -> float:
    """The longest time in which no client got a token."""
    times = sorted(t for a in answers for t in a.tokens_s)
    return max((b - a for a, b in pairwise(times)), default=0.0)


def check_silence(answers: Sequence[Answer], window_s: float) -> list[Violation]:
    """Clients that loop got tokens all the time, but for the window."""
    silence_s = longest_silence_s(answers)
    if silence_s <= window_s:
        return []
    what = f"no token for {silence_s:.2f} s; {window_s:g} s are allowed"
    return [Violation(Rule.SILENCE, what)]
