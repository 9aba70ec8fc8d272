"""The seams of snapshots (imager, namespace, CUDA driver, GPU inventory), their value types and
their state machines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from dynamo_elastic.errors import IllegalTransition
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.process import ProcessRef, command

BOOT_LOG = "boot.log"
"""In the control directory: output of an engine until it is attached. It is open in the image."""

PIDS_PER_SLOT = 1000


def first_pid(slot: int) -> int:
    """Lowest pid of the range that images of `slot` use; ranges of slots don't overlap."""
    return PIDS_PER_SLOT * (slot + 1)


@dataclass(frozen=True, slots=True)
class PidHolder:
    """Who has a pid inside a namespace. `what`: 'process', 'thread', 'session' or 'group'."""

    pid: int
    what: str
    process: int
    """The process's pid in our own namespace."""

    def __str__(self) -> str:
        holder = f"process {self.process} ({command(self.process)})"
        return f"pid {self.pid} is a {self.what} of {holder}"


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start in directory `/`. Its output is appended to `log_path`."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log_path: Path


class Namespace(Protocol):
    """Where engines run and CRIU works."""

    def spawn(self, command: Command, *, pid: int | None = None) -> ProcessRef:
        """Start it in a session of its own, as `pid` inside if given."""
        ...

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside."""
        ...

    def host_process(self, pid: int) -> ProcessRef:
        """The process that has `pid` inside. Raises ProcessLookupError if there is none."""
        ...

    def wait_reaped(self, pid: int, *, timeout_s: float) -> None:
        """Return once no dead process holds `pid` inside (at once if a live one does, or none)."""
        ...

    def holder(self, pids: Collection[int]) -> PidHolder | None:
        """Who has one of `pids` inside, as a process or as a thread; None if all are free."""
        ...

    def view(self, path: Path) -> Path:
        """Where we find what processes inside call `path`."""
        ...

    def end(self, *, timeout_s: float) -> None:
        """Kill every process inside; nothing of the namespace is left. Idempotent."""
        ...


class Imager(Protocol):
    """Turns a process into files and files into a process. Raises ImagerError, PidClash or
    ResourceMissing; after any of them a dumped process runs on, and nothing was restored."""

    def version(self) -> str: ...

    def dump(
        self, process: ProcessRef, directory: Path, namespace: Namespace, *, timeout_s: float
    ) -> None:
        """Write the image into `directory`; the process is gone."""
        ...

    def restore(
        self, directory: Path, namespace: Namespace, *, work_dir: Path, timeout_s: float
    ) -> ProcessRef:
        """The process runs again, under its old pids, as a child of the namespace's first."""
        ...


class CudaState(StrEnum):
    """Where a process that holds CUDA stands, as the driver says it."""

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"
    CHECKPOINTING = "checkpointing"
    RESTORING = "restoring"


class CudaOperation(StrEnum):
    """What can be asked of a process that holds CUDA."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


CUDA_MOVES: Mapping[tuple[CudaState, CudaOperation], CudaState] = {
    (CudaState.RUNNING, CudaOperation.LOCK): CudaState.LOCKED,
    (CudaState.LOCKED, CudaOperation.CHECKPOINT): CudaState.CHECKPOINTED,
    (CudaState.CHECKPOINTED, CudaOperation.RESTORE): CudaState.LOCKED,
    (CudaState.LOCKED, CudaOperation.UNLOCK): CudaState.RUNNING,
}
"""Any other is refused. Checkpointing and restoring come with custom storage, which we don't use:
they can be seen, not left."""


@dataclass(frozen=True, slots=True)
class CudaCapabilities:
    """What the driver here can do, by the symbols that it has. `version`: of CUDA, 13000 is 13.0;
    for people to read only."""

    version: int
    checkpoint: bool
    gpu_map: bool
    """A process can be restored onto other GPUs than it came from."""
    custom_storage: bool


class CudaDriver(Protocol):
    """CUDA state of other processes, by their pid in our namespace. Calls may run side by side.

    Raises CudaError, whose `state` says where the process is left; CudaTimeout if the deadline
    passed (a process whose call did not return has been killed); ResourceMissing without a driver.
    """

    def capabilities(self) -> CudaCapabilities: ...

    def holds_cuda(self, pid: int) -> bool:
        """True if it has CUDA initialised."""
        ...

    def state(self, pid: int) -> CudaState: ...

    def lock(self, pid: int, *, timeout_s: float) -> None:
        """From running to locked; its CUDA calls wait from now on."""
        ...

    def checkpoint(self, pid: int, *, timeout_s: float) -> None:
        """From locked to checkpointed: device memory is in host memory, the GPU is released. It
        does not prove that it can be restored."""
        ...

    def restore(
        self, pid: int, *, gpu_map: Mapping[str, str] | None = None, timeout_s: float
    ) -> None:
        """From checkpointed to locked. `gpu_map`: uuid of each GPU of the host at the checkpoint ->
        the one to take its place, a full permutation; None: each its own."""
        ...

    def unlock(self, pid: int, *, timeout_s: float) -> None:
        """From locked to running."""
        ...


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU of this host. `index`: the driver's (NVML's) order, which CUDA's need not be."""

    uuid: str
    """Like 'GPU-00112233-4455-6677-8899-aabbccddeeff'."""
    index: int
    name: str
    compute_capability: str
    """Like '9.0'."""
    pci_bus_id: str
    driver_version: str
    total_bytes: int
    free_bytes: int


class GpuInventory(Protocol):
    """The GPUs of this host and who uses them. Raises ResourceMissing if the driver is gone."""

    def gpus(self) -> tuple[GpuInfo, ...]:
        """All of them by index; () on a host without a GPU or driver."""
        ...

    def used_bytes(self, pid: int) -> int | None:
        """Device memory of that process on all GPUs; None if the driver does not list it: it holds
        none, or goes by another pid there."""
        ...

    def devices_of(self, pid: int) -> Mapping[str, int | None]:
        """Uuid of each GPU that really holds memory of that process, whatever it says itself ->
        bytes, None if not told; {} like None of used_bytes()."""
        ...


class TakePhase(StrEnum):
    """Where take_snapshot() stands."""

    START = "start"
    BOOT = "boot"
    INSPECT = "inspect"
    FREEZE = "freeze"
    """CUDA out of the GPUs; nothing to do without."""
    DUMP = "dump"
    STORE = "store"
    DONE = "done"
    FAILED = "failed"


class RestorePhase(StrEnum):
    """Where restore_snapshot() stands."""

    START = "start"
    COMPARE = "compare"
    VERIFY = "verify"
    RESTORE = "restore"
    THAW = "thaw"
    """CUDA back into the GPUs; nothing to do without."""
    DONE = "done"
    FAILED = "failed"


P = TypeVar("P", TakePhase, RestorePhase)
Notify = Callable[[P], None]
Moves = Mapping[P, frozenset[P]]


def _chain(*phases: P, failed: P) -> dict[P, frozenset[P]]:
    """Each phase goes to the next one or to `failed`; the last one is final."""
    moves = {a: frozenset({b, failed}) for a, b in itertools.pairwise(phases)}
    return moves | {phases[-1]: frozenset(), failed: frozenset()}


_T, _R = TakePhase, RestorePhase
TAKE_MOVES: Moves[TakePhase] = _chain(
    *(_T.START, _T.BOOT, _T.INSPECT, _T.FREEZE, _T.DUMP, _T.STORE, _T.DONE), failed=_T.FAILED
)
RESTORE_MOVES: Moves[RestorePhase] = _chain(
    *(_R.START, _R.COMPARE, _R.VERIFY, _R.RESTORE, _R.THAW, _R.DONE), failed=_R.FAILED
)


class Track(Generic[P]):
    """Walks one machine, tells `notify` of each phase as it begins, and times them. With a name
    there is a failpoint at the beginning of each phase that may fail."""

    def __init__(
        self,
        moves: Moves[P],
        start: P,
        notify: Notify[P] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        name: str = "",
    ) -> None:
        self._name = name
        self._moves: Moves[P] = moves
        self._notify: Notify[P] | None = notify
        self._clock = clock
        self._since = clock()
        self._timings_s: dict[str, float] = {}
        self.phase: P = start

    def to(self, phase: P) -> None:
        """Begin `phase`. Raises IllegalTransition, and stays, if the table has no such move."""
        if phase not in self._moves[self.phase]:
            raise IllegalTransition(type(phase).__name__, self.phase, phase)
        self._timings_s = self.timings_s()
        self.phase, self._since = phase, self._clock()
        if self._notify is not None:
            self._notify(phase)
        if self._name and self._moves[phase]:
            failpoint(f"{self._name}.{phase}")

    def timings_s(self) -> dict[str, float]:
        """Seconds by phase, the one under way included."""
        return self._timings_s | {self.phase.value: self._clock() - self._since}
