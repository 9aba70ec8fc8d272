"""Every error that dynamo_elastic raises.

* ElasticError
  + RequestError               one user's request can't be served here
    - RequestRefused           the request itself is at fault
    - RequestMoved             not an error: it has to go on on another rank
  + RegistrationFailed         Dynamo did not answer or refused; the instance is not registered
  + ConfigError                a setting is wrong; carries .faults (one line each: field and remedy)
  + ResourceMissing            this host lacks something (root, CRIU, a driver); carries .remedy
  + StoreError
    - StoreUnavailable         the request certainly did not take effect
      . StoreRefused           it does not let us in: certificate, password or role; needs somebody
    - OutcomeUnknown           the request may or may not have taken effect
    - GuardFailed              a transaction's guard did not hold; nothing was applied
  + SessionLost                our lease ran out; carries .cause
  + LeadershipLost             this coordinator was fenced off; stop writing
  + StaleCommand               a command carried a token older than one already seen; refused
  + IllegalTransition          a state machine was asked for a move it does not have
  + TargetRefused              a scale target is not legal; carries .reason (nothing changed)
  + TargetSuperseded           a newer target came before it was reached; carries .reason
  + RequestIdTaken             the id is that of another target; nothing was changed
  + ScaleError                 one scale operation failed; carries .operation_id and .phase
    - PhaseTimeout             not every participant acknowledged in time; carries .ranks
    - ParticipantFailed        carries .rank
    - ScaleAborted             rolled back; the topology before it is still in force
  + EngineError                an engine refused or failed a request; carries .took_effect
    - EngineGone               its process or socket went away
    - SlotLeased               the slot belongs to another operation or a newer epoch; nothing done
    - CallerRefused            this user may not call that socket; nothing done
  + TransferError              a memory transfer failed; carries .remote and .bytes_done
    - TransferTimeout          it made no progress before its deadline
    - TransferTooSlow          it fell below its floor: it has left NVLink; carries .gbps
    - DigestMismatch           bytes arrived, but not the right ones; carries .regions
  + DeviceMemoryError          the driver refused a call on our own GPU memory; carries .call, .name
    - DeviceMemoryFull         the GPU has too little; carries .needed_bytes and .free_bytes
  + PeerLost                   an expert-parallel peer went away; carries .ranks
    - PeerUnreachable          it could not be connected; serving goes on without it
  + BufferMisused              a call broke a rule of an expert buffer; refused; carries .remedy
  + RebindError                CUDA graphs can't be made to use another buffer; capture them again
    - RebindRefused            found out before anything was written: the graphs are as they were
    - RebindFailed             the graphs are a mix, or compute wrong results: never replay them
  + SnapshotError
    - SnapshotNotFound
    - SnapshotInUse            somebody holds the snapshot or the catalog; nothing was changed
    - SnapshotDamaged          a file is missing, altered, or not ours; nothing was run
      . SnapshotNewer          a newer version wrote it: not for this one to read or remove
    - SnapshotUntrusted        nobody whom we trust has signed it; nothing was run
    - SnapshotMismatch         the fingerprint does not fit; carries .mismatches
    - NotQuiescent             the process holds what an image must not; carries .findings
    - ImagerError              CRIU failed; carries .argv, .returncode and .log_tail
      . PidClash               a pid of the image is taken in the namespace; carries .pid
    - CudaError                the driver refused or failed; carries .pid, .operation, .code, .name
                               and .state, in which the process is left
      . CudaTimeout            no answer in time; .state None: the process was killed
    - GpuMemoryShort           too little is free; nothing was tried; carries .uuid, .needed_bytes
                               and .free_bytes
    - ProcessesLost            processes between two states, killed; carries .states (pid -> last)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ElasticError(Exception):
    """Base class: `except ElasticError` catches everything this package raises."""


class ConfigError(ElasticError):
    """Settings are wrong. Every fault is listed at once, with its field and its remedy."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


class RegistrationFailed(ElasticError):
    """Dynamo did not answer or refused: the instance is not registered, or goes with its lease."""


class RequestError(ElasticError):
    """One user's request can't be served on this rank."""


class RequestRefused(RequestError):
    """The request itself is at fault; no rank would serve it."""


class RequestMoved(RequestError):
    """The request has to go on on another rank, from the tokens that it has so far."""


class ResourceMissing(ElasticError):
    """This host lacks something that the act needs; nothing was changed."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.remedy = remedy


class StoreError(ElasticError):
    """The coordination store could not serve a request."""


class StoreUnavailable(StoreError):
    """The request certainly did not take effect; it is safe to try again."""


class StoreRefused(StoreUnavailable):
    """The store does not let us in, or we don't trust it: nothing took effect, and nothing will
    until somebody mends a certificate, a password or a role. Those who run on try again."""


class OutcomeUnknown(StoreError):
    """The reply was lost: the request may have taken effect. Read before retrying."""


class GuardFailed(StoreError):
    """A transaction was refused because one of its guards did not hold."""


class SessionLost(ElasticError):
    """Our lease ran out or was revoked: every key on it is gone."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"session lost: {cause}")
        self.cause = cause


class LeadershipLost(ElasticError):
    """Another coordinator holds a newer fencing token; stop writing at once."""


class StaleCommand(ElasticError):
    """A command carried an older fencing token than one already seen; it was not run."""


class IllegalTransition(ElasticError):
    """A state machine was asked for a move that its table does not have."""

    def __init__(self, machine: str, before: str, after: str) -> None:
        super().__init__(f"{machine} cannot go from {before} to {after}")
        self.before = before
        self.after = after


class TargetRefused(ElasticError):
    """A scale target is not legal; nothing was changed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TargetSuperseded(ElasticError):
    """Somebody asked for another width before this target was reached: theirs is in force."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RequestIdTaken(ElasticError):
    """The request id is that of a target for another width; nothing was changed."""


class ScaleError(ElasticError):
    """Base class for the failure of one scale operation."""

    def __init__(self, message: str, *, operation_id: str, phase: str) -> None:
        super().__init__(f"{message} (operation {operation_id}, phase {phase})")
        self.reason = message
        self.operation_id = operation_id
        self.phase = phase


class PhaseTimeout(ScaleError):
    """Not every participant acknowledged a phase before its deadline."""

    def __init__(
        self, message: str, *, operation_id: str, phase: str, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(message, operation_id=operation_id, phase=phase)
        self.ranks = tuple(ranks)


class ParticipantFailed(ScaleError):
    """One participant reported failure, or its lease ran out, during a phase."""

    def __init__(self, message: str, *, operation_id: str, phase: str, rank: int) -> None:
        super().__init__(message, operation_id=operation_id, phase=phase)
        self.rank = rank


class ScaleAborted(ScaleError):
    """The operation was rolled back; the topology before it is still in force."""


class EngineError(ElasticError):
    """An engine refused or failed a request; `took_effect` says whether its state changed."""

    def __init__(self, message: str, *, took_effect: bool = False) -> None:
        super().__init__(message)
        self.took_effect = took_effect


class EngineGone(EngineError):
    """The engine's process or its socket went away: what it was doing is lost with it."""


class SlotLeased(EngineError):
    """The GPU slot is leased to another operation, worker or newer epoch; nothing was changed."""


class CallerRefused(EngineError):
    """The socket's owner does not serve this user; the call was not looked at."""


class TransferError(ElasticError):
    """A memory transfer failed. The destination region holds an unknown mix of bytes."""

    def __init__(self, message: str, *, remote: str, bytes_done: int = 0) -> None:
        super().__init__(f"{message} (remote agent {remote}, {bytes_done} bytes done)")
        self.remote = remote
        self.bytes_done = bytes_done


class TransferTimeout(TransferError):
    """A transfer made no progress before its deadline; late bytes may still land."""


class TransferTooSlow(TransferError):
    """A transfer fell below its floor, so it has left NVLink; late bytes may still land."""

    def __init__(self, message: str, *, remote: str, bytes_done: int, gbps: float) -> None:
        super().__init__(f"{message}: {gbps:.2f} GB/s", remote=remote, bytes_done=bytes_done)
        self.gbps = gbps


class DigestMismatch(TransferError):
    """Bytes arrived, but not the right ones."""

    def __init__(self, *, remote: str, regions: Sequence[str]) -> None:
        shown = ", ".join(list(regions)[:3])
        super().__init__(f"digest mismatch in {len(regions)} regions ({shown})", remote=remote)
        self.regions = tuple(regions)


class DeviceMemoryError(ElasticError):
    """The CUDA driver refused a call on this process's own GPU memory; `name` is the driver's."""

    def __init__(self, call: str, name: str, why: str = "") -> None:
        super().__init__(f"{call}: {why or name}")
        self.call = call
        self.name = name


class DeviceMemoryFull(DeviceMemoryError):
    """A GPU has too little free memory for what was asked; nothing was taken."""

    def __init__(self, device: int, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            "cuMemCreate",
            "CUDA_ERROR_OUT_OF_MEMORY",
            f"device {device} has {free_bytes} bytes free, {needed_bytes} more are needed: "
            "end what uses it",
        )
        self.device = device
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class PeerLost(ElasticError):
    """Expert-parallel peers went away; tokens of the step at hand are not to be used."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"lost expert-parallel peers {sorted(ranks)}")
        self.ranks = frozenset(ranks)


class PeerUnreachable(PeerLost):
    """Expert-parallel peers could not be connected; ranks that serve already go on without them."""

    def __init__(self, ranks: Sequence[int], why: str) -> None:
        super().__init__(ranks)
        self.args = (f"expert-parallel peers {sorted(ranks)} are not reachable: {why}",)
        self.why = why


class BufferMisused(ElasticError):
    """A call broke a rule of an expert buffer; it was refused and nothing was changed."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.remedy = remedy


class RebindError(ElasticError):
    """CUDA graphs can't be made to use another buffer. The remedy is to capture them again."""


class RebindRefused(RebindError):
    """Found out before anything was written: the graphs are as they were, for the old buffer."""


class RebindFailed(RebindError):
    """The graphs are a mix of two buffers, or compute wrong results: never replay them."""


class SnapshotError(ElasticError):
    """Base class for everything about snapshots."""


class SnapshotNotFound(SnapshotError):
    """No such snapshot in the catalog."""


class SnapshotInUse(SnapshotError):
    """Somebody else holds the snapshot, or the catalog for too long; nothing was changed."""


class SnapshotDamaged(SnapshotError):
    """A file of the snapshot is missing, altered, or not ours; nothing of it was run."""


class SnapshotNewer(SnapshotDamaged):
    """A newer version of this program wrote it; nothing was run, and it is not ours to remove."""


class SnapshotUntrusted(SnapshotError):
    """Nobody whom this host trusts has signed the snapshot as it is; nothing of it was run."""


class SnapshotMismatch(SnapshotError):
    """The snapshot was made for another world than this one; no process was touched."""

    def __init__(self, image_id: str, mismatches: Sequence[str]) -> None:
        super().__init__(f"snapshot {image_id} does not fit: {'; '.join(mismatches)}")
        self.mismatches = tuple(mismatches)


class NotQuiescent(SnapshotError):
    """The process holds what an image must not hold; it was not dumped and still runs."""

    def __init__(self, findings: Sequence[str]) -> None:
        super().__init__(f"process is not quiescent: {'; '.join(findings)}")
        self.findings = tuple(findings)


class ImagerError(SnapshotError):
    """CRIU failed. After a failed dump the process runs on; after a restore nothing is left."""

    def __init__(self, argv: Sequence[str], returncode: int, log_tail: str) -> None:
        super().__init__(f"{' '.join(list(argv)[:3])} failed with {returncode}: {log_tail}")
        self.argv = tuple(argv)
        self.returncode = returncode
        self.log_tail = log_tail


class PidClash(ImagerError):
    """A pid of the image is already taken in the engines' pid namespace."""

    def __init__(self, argv: Sequence[str], returncode: int, log_tail: str, *, pid: int) -> None:
        super().__init__(argv, returncode, log_tail)
        self.pid = pid


class CudaError(SnapshotError):
    """The CUDA driver refused or failed an operation on a process, which is left in `state`; None:
    it is gone, or nobody knows. `code` and `name` are the driver's (0 and '' if it never answered).
    """

    def __init__(
        self, operation: str, pid: int, *, code: int, name: str, state: str | None, why: str = ""
    ) -> None:
        left = f"it is left {state}" if state else "its state is not known"
        super().__init__(f"CUDA {operation} of process {pid}: {why or name}; {left}")
        self.operation = operation
        self.pid = pid
        self.code = code
        self.name = name
        self.state = state


class CudaTimeout(CudaError):
    """The operation did not end before its deadline. A process that could not be locked runs on;
    one whose call did not return was killed, which is the only way to end the call."""


class GpuMemoryShort(SnapshotError):
    """A GPU has too little free memory for what is to come back; nothing was tried."""

    def __init__(self, uuid: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{uuid} has {free_bytes} bytes free, {needed_bytes} are needed: end what uses it"
        )
        self.uuid = uuid
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class ProcessesLost(SnapshotError):
    """Processes stood between two states when one of them failed; they were killed. `states`: pid
    -> the last one known."""

    def __init__(self, states: Mapping[int, str], cause: str) -> None:
        shown = ", ".join(f"{pid} ({state})" for pid, state in states.items())
        super().__init__(f"killed processes {shown}: {cause}")
        self.states = dict(states)
