"""Every etcd key and every record under it, with their codec and schema version.

/dynamo-elastic/{deployment}/
  owner                 who runs this deployment (lease): a second `serve` is refused
  leader                the coordinator in charge (lease); its create revision is the token
  controller            the Kubernetes controller in charge (lease)
  topology              Topology in force
  decided               its epoch: small, for all who must know at once
  operation             OperationRecord of the one operation under way; absent when idle
  last                  OperationRecord of the newest finished operation
  epoch                 the highest epoch ever used
  target                TargetRecord: newest wins
  outcome               TargetOutcome: the coordinator's newest answer to a target
  notice                what the coordinator waits for; absent when it waits for nothing
  capacity              CapacityRecord: which widths can be had, for those who decide
  warnings/{name}       WarningRecord: what somebody who writes targets wants people to know
  members/{worker}      MemberRecord (lease of the shell)
  commands/{worker}     CommandRecord: the newest command to that participant
  payloads/{digest}     what commands of the operation under way have in common
  acks/{worker}         AckRecord (lease of the shell): its answer
  endpoints/{epoch}/{worker}  EndpointRecord (lease of the shell): how to reach its engine
  traffic/{operation}/{worker}  WorkerTraffic (lease of the shell): tokens around an operation that
                        has ended, until the coordinator has taken it into the report
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.phases import Kind, Phase, Step
from dynamo_elastic.topology import ScalePlan, Topology
from dynamo_elastic.types import (
    NO_EPOCH,
    NO_INCARNATION,
    Epoch,
    FencingToken,
    Incarnation,
    OperationId,
    WorkerId,
)

SCHEMA_VERSION = 1
"""What this program writes."""
NEWEST_READ = 1
"""The newest that it reads. A release that brings a version reads it, and still writes the one
before; the next one writes it: so any two neighbours run side by side (docs/upgrade.md). A field
with a default that others may ignore is no new version."""
NO_OPERATION = OperationId("")
ROOT = "/dynamo-elastic"

T = TypeVar("T")


class RecordError(ElasticError):
    """A stored record can't be read: it is damaged, or of another schema version."""


class RecordNewer(RecordError):
    """A newer version of this program wrote it; nothing was done with it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one deployment."""

    deployment: str

    @property
    def prefix(self) -> str:
        return f"{ROOT}/{self.deployment}/"

    @property
    def owner(self) -> str:
        return f"{self.prefix}owner"

    @property
    def leader(self) -> str:
        return f"{self.prefix}leader"

    @property
    def controller(self) -> str:
        return f"{self.prefix}controller"

    @property
    def topology(self) -> str:
        return f"{self.prefix}topology"

    @property
    def decided(self) -> str:
        return f"{self.prefix}decided"

    @property
    def operation(self) -> str:
        return f"{self.prefix}operation"

    @property
    def last(self) -> str:
        return f"{self.prefix}last"

    @property
    def epoch(self) -> str:
        return f"{self.prefix}epoch"

    @property
    def target(self) -> str:
        return f"{self.prefix}target"

    @property
    def outcome(self) -> str:
        return f"{self.prefix}outcome"

    @property
    def notice(self) -> str:
        return f"{self.prefix}notice"

    @property
    def capacity(self) -> str:
        return f"{self.prefix}capacity"

    @property
    def warnings(self) -> str:
        return f"{self.prefix}warnings/"

    def warning(self, name: str) -> str:
        return f"{self.warnings}{name}"

    @property
    def members(self) -> str:
        return f"{self.prefix}members/"

    @property
    def acks(self) -> str:
        return f"{self.prefix}acks/"

    @property
    def commands(self) -> str:
        return f"{self.prefix}commands/"

    def member(self, worker: WorkerId) -> str:
        return f"{self.members}{worker}"

    @property
    def payloads(self) -> str:
        return f"{self.prefix}payloads/"

    def payload(self, name: str) -> str:
        return f"{self.payloads}{name}"

    def command(self, worker: WorkerId) -> str:
        return f"{self.commands}{worker}"

    def ack(self, worker: WorkerId) -> str:
        return f"{self.acks}{worker}"

    @property
    def all_endpoints(self) -> str:
        return f"{self.prefix}endpoints/"

    def endpoints(self, epoch: Epoch) -> str:
        return f"{self.all_endpoints}{epoch:08d}/"

    def endpoint(self, epoch: Epoch, worker: WorkerId) -> str:
        return f"{self.endpoints(epoch)}{worker}"

    def all_traffic(self, operation: OperationId) -> str:
        return f"{self.prefix}traffic/{operation}/"

    def traffic(self, operation: OperationId, worker: WorkerId) -> str:
        return f"{self.all_traffic(operation)}{worker}"


class MemberState(StrEnum):
    """What a worker shell is doing."""

    STANDBY = "standby"
    """No engine: free to be a joiner."""
    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A live worker shell. `lost_reason` is set while its engine is dead but its rank is not yet
    taken from it."""

    worker_id: WorkerId
    slot: int
    host: str
    pid: int
    state: MemberState
    incarnation: Incarnation = NO_INCARNATION
    lost_reason: str = ""
    masks: tuple[WorkerId, ...] = ()
    """Members of epoch `masks_in` that its engine steps without: they did not answer it."""
    masks_in: Epoch = NO_EPOCH


@dataclass(frozen=True, slots=True)
class EarlierTarget:
    """A target that a newer one has taken the place of."""

    request_id: str
    ranks: int
    source: str
    requested_at_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """How many ranks somebody wants. `ranks` is absolute. Written by targets.request_scale(),
    so that who is superseded can see by whom."""

    request_id: str
    ranks: int
    source: str
    """Who wants it: 'planner', 'cli', 'api', 'keda', 'boot' or whatever a client calls itself."""
    requested_at_s: float
    detail: str = ""
    """Which of its wishes it is, say 'decision 17'."""
    supersedes: tuple[EarlierTarget, ...] = ()
    """Those before it, newest first; the last few."""
    leaving: WorkerId | None = None
    """If ranks leave, this one is the first of them."""


@dataclass(frozen=True, slots=True)
class CapacityRecord:
    """Which widths can be had now, as the leader sees it between operations."""

    width: int
    """Ranks in force."""
    legal: tuple[int, ...]
    """Widths that the model's experts, the settings and the slots that exist allow, in order."""
    attainable: int
    """For so many ranks there are GPUs: of ranks that live, and free ones."""
    withheld: dict[WorkerId, str] = field(default_factory=dict)
    """Free slots that are not counted, being in quarantine, and why."""
    until_s: float | None = None
    """When the first of them is let out (wall clock)."""


@dataclass(frozen=True, slots=True)
class WarningRecord:
    """Something that people must know, said by one of those who write targets."""

    text: str
    at_s: float


class OutcomeStatus(StrEnum):
    """What became of a target."""

    REACHED = "reached"
    UNCHANGED = "unchanged"
    """That width was in force already."""
    REFUSED = "refused"
    """Not legal; nothing was changed, and the target in force before is wanted again."""
    FAILED = "failed"
    """Given up after repeated failures; the width in force is the target now."""
    SUPERSEDED = "superseded"
    """A newer target came before this one was answered."""


@dataclass(frozen=True, slots=True)
class TargetOutcome:
    """The answer to the target with the same request id."""

    request_id: str
    ranks: int
    status: OutcomeStatus
    reason: str = ""
    operation_id: OperationId = NO_OPERATION


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """One command to one participant. Run once for each (operation_id, seq)."""

    operation_id: OperationId
    epoch: Epoch
    token: FencingToken
    seq: int
    step: Step
    deadline_s: float
    """Seconds that the participant has, from when it reads the command."""
    payload: dict[str, Any] = field(default_factory=dict)
    common: str = ""
    """Name of the rest of its payload, which it has in common with others: see payloads.py."""


class AckStatus(StrEnum):
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AckRecord:
    """A participant's answer to the command with the same operation id and seq."""

    operation_id: OperationId
    token: FencingToken
    seq: int
    step: Step
    status: AckStatus
    reason: str = ""
    elapsed_s: float = 0.0
    payload: dict[str, Any] = field(default_factory=dict)
    began_at_s: float = 0.0
    """By the participant's wall clock."""


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """One phase as it went: wall-clock start, seconds, and facts worth showing."""

    phase: Phase
    started_at_s: float
    elapsed_s: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Strike:
    """Failures in a row of one suspect: a slot, or the image of a slot."""

    count: int
    reason: str
    at_s: float
    """Wall clock of the newest."""


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """The one durable scale operation: who, what, how far, and why it stopped."""

    operation_id: OperationId
    kind: Kind
    plan: ScalePlan
    phase: Phase
    source: str
    request_id: str
    token: FencingToken
    topology_revision: int
    """mod_revision of the topology that the plan was made from (0: there was none)."""
    opened_at_s: float
    requested_ranks: int = 0
    """What was asked for, before it was made legal."""
    phases: tuple[PhaseRecord, ...] = ()
    participants: dict[WorkerId, str] = field(default_factory=dict)
    """Last answer of each participant: '<step> done', '<step> failed: why', 'lost'."""
    lost: tuple[WorkerId, ...] = ()
    """Members that were gone when it opened, and those of the new topology that failed after
    COMMIT: not commanded any more, to be evicted."""
    discarded: tuple[WorkerId, ...] = ()
    """Of a boot: members of a topology that can't serve any more; their engines are ended first."""
    current: Topology | None = None
    """Once experts have begun to move: the topology in force, with a placement that is safe to
    route by whatever became of the copies under way. None: the one stored under `topology`."""
    failure: str = ""
    elapsed_s: float = 0.0
    safe_to_release: tuple[WorkerId, ...] = ()
    """Leavers whose GPUs are free."""
    served: Topology | None = None
    """What the ranks serve by, if that is not the stored topology: its decision was withdrawn
    before anybody had switched, and has to be superseded."""
    strikes: dict[str, Strike] = field(default_factory=dict)
    """Who failed as a joiner lately, in operations before this one too: see quarantine.py."""
    cold: tuple[WorkerId, ...] = ()
    """Joiners whose image is in quarantine: booted cold."""


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """How peers reach one engine in one epoch. Opaque to the control plane."""

    worker_id: WorkerId
    incarnation: Incarnation
    epoch: Epoch
    endpoint: dict[str, Any]


Upgrade = Callable[[str, Any], Any]
UPGRADES: dict[int, Upgrade] = {}
"""Version -> what makes of a record's plain body (first: the name of its kind) one of the next."""

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
_ENVELOPE = TypeAdapter(dict[str, Any])

# A topology of a thousand ranks is 80 KB of JSON, an operation on it 600, and etcd takes 1.5 MiB
# and sends each to whoever asks: they shrink to a tenth. What a person looks at stays readable.
_COMPRESSED_FROM_BYTES = 32 << 10
_MOST_BYTES = 64 << 20


def encode(record: object) -> bytes:
    """JSON of a record, with the schema version; a large one is compressed (zlib)."""
    body: bytes = _adapter(type(record)).dump_json(record)
    raw = b'{"schema_version":%d,"record":%s}' % (SCHEMA_VERSION, body)
    return raw if len(raw) < _COMPRESSED_FROM_BYTES else zlib.compress(raw, level=1)


def decode(kind: type[T], raw: bytes) -> T:
    """The record in `raw`, of this schema version or an older one. Raises RecordError if it is
    damaged, RecordNewer if a newer version of this program wrote it."""
    try:
        envelope = _envelope(raw)
        version, body = envelope.get("schema_version"), envelope.get("record")
        known = f"{kind.__name__} has schema version {version}, this program reads 1-{NEWEST_READ}"
        if type(version) is not int or version < 1:
            raise RecordError(known)
        if version > NEWEST_READ:
            raise RecordNewer(f"{known}: upgrade it; it leaves alone what it can't read")
        for step in range(version, NEWEST_READ):
            body = UPGRADES[step](kind.__name__, body)
        result: T = _adapter(kind).validate_python(body)
    except (ValidationError, ValueError, zlib.error) as exc:
        raise RecordError(f"{kind.__name__} can't be read: {exc}") from exc
    return result


def plain(raw: bytes) -> dict[str, Any]:
    """What a record of whatever version says, unchecked: to tell its writer why it is refused. {}
    if that is not to be seen."""
    try:
        body = _envelope(raw).get("record")
    except (ValidationError, ValueError, zlib.error):
        return {}
    return body if isinstance(body, dict) else {}


def _envelope(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = _ENVELOPE.validate_json(raw if raw[:1] == b"{" else _inflated(raw))
    return found


def _inflated(raw: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    inflated = unpacker.decompress(raw, _MOST_BYTES)
    if not unpacker.eof:
        raise ValueError("it is cut off, or too large")
    return inflated


def to_json(value: object) -> Any:
    """`value` as plain JSON types, for the payload of a command or an ack."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(kind: type[T], value: object) -> T:
    """The inverse of to_json(). Raises RecordError if `value` is not a `kind`."""
    try:
        result: T = _adapter(kind).validate_python(value)
    except ValidationError as exc:
        raise RecordError(f"{kind.__name__} can't be read: {exc}") from exc
    return result


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
