"""CUDA state of several processes at once: all of them out of their GPUs, or back in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from dynamo_elastic.errors import CudaError, EngineError, ProcessesLost
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.base import CUDA_MOVES, CudaDriver, CudaOperation, CudaState
from dynamo_elastic.snapshot.process import ProcessRef, identify, kill_and_wait, tree_of

Kill = Callable[[ProcessRef], None]

_RECOVERY_TIMEOUT_S = 5.0
_LEAST_TIMEOUT_S = 0.001


def kill_lost(process: ProcessRef) -> None:
    kill_and_wait(process, timeout_s=_RECOVERY_TIMEOUT_S)


def cuda_processes(root: ProcessRef, driver: CudaDriver) -> tuple[ProcessRef, ...]:
    """`root` and those of its descendants that hold CUDA; () for an engine without a GPU."""
    members = (identify(pid) for pid in tree_of(root.pid))
    return tuple(p for p in members if p is not None and driver.holds_cuda(p.pid))


def freeze(
    processes: Sequence[ProcessRef], driver: CudaDriver, *, timeout_s: float, kill: Kill = kill_lost
) -> dict[str, float]:
    """All are checkpointed, and hold no GPU; seconds by operation. All are locked before the first
    is checkpointed, so none sees another one half gone.

    That proves nothing of their return: a process with an open CUDA IPC import passes, and can't be
    restored. Raises CudaError if one could not be locked: all run as before. Raises ProcessesLost
    if a later step failed: those only locked run again, those named were killed.
    """
    return _all(
        (CudaOperation.LOCK, CudaOperation.CHECKPOINT),
        _Group(driver, processes, CudaState.RUNNING, timeout_s),
        kill,
    )


def thaw(
    processes: Sequence[ProcessRef],
    driver: CudaDriver,
    *,
    gpu_map: Mapping[str, str] | None = None,
    timeout_s: float,
    kill: Kill = kill_lost,
) -> dict[str, float]:
    """All run again with their GPUs; seconds by operation. All are restored before the first is
    unlocked.

    Nothing is tried twice: a failed restore is for good. Raises ProcessesLost: those that were
    restored run, those named were killed.
    """
    return _all(
        (CudaOperation.RESTORE, CudaOperation.UNLOCK),
        _Group(driver, processes, CudaState.CHECKPOINTED, timeout_s, gpu_map),
        kill,
    )


def _all(operations: Sequence[CudaOperation], group: _Group, kill: Kill) -> dict[str, float]:
    timings_s: dict[str, float] = {}
    try:
        for operation in operations:
            began = time.monotonic()
            group.apply(operation)
            timings_s[operation] = time.monotonic() - began
    except Exception as exc:
        lost, faults = group.recover(kill)
        if lost:
            raise ProcessesLost(lost, "; ".join([str(exc), *faults])) from exc
        raise
    except BaseException:
        group.recover(kill)
        raise
    return timings_s


class _Group:
    """Processes and where each stands. `_doubtful`: those whose last operation did not succeed."""

    def __init__(
        self,
        driver: CudaDriver,
        processes: Sequence[ProcessRef],
        state: CudaState,
        timeout_s: float,
        gpu_map: Mapping[str, str] | None = None,
    ) -> None:
        self._driver = driver
        self._states = dict.fromkeys(processes, state)
        self._deadline = time.monotonic() + timeout_s
        self._gpu_map = gpu_map
        self._doubtful: set[ProcessRef] = set()

    def apply(self, operation: CudaOperation) -> None:
        """`operation` on each of them, one after the other."""
        for process, state in self._states.items():
            self._doubtful.add(process)
            self._call(process, operation, max(_LEAST_TIMEOUT_S, self._deadline - time.monotonic()))
            self._states[process] = CUDA_MOVES[state, operation]
            self._doubtful.discard(process)

    def _call(self, process: ProcessRef, operation: CudaOperation, timeout_s: float) -> None:
        driver, pid = self._driver, process.pid
        failpoint(f"cuda.{operation}")
        match operation:
            case CudaOperation.LOCK:
                driver.lock(pid, timeout_s=timeout_s)
            case CudaOperation.CHECKPOINT:
                driver.checkpoint(pid, timeout_s=timeout_s)
            case CudaOperation.RESTORE:
                driver.restore(pid, gpu_map=self._gpu_map, timeout_s=timeout_s)
            case CudaOperation.UNLOCK:
                driver.unlock(pid, timeout_s=timeout_s)

    def recover(self, kill: Kill) -> tuple[dict[int, str], list[str]]:
        """No process is between two states: it runs, or it was killed. Who was (pid -> last state),
        and what went wrong with that."""
        lost: dict[int, str] = {}
        faults: list[str] = []
        for process, state in self._states.items():
            left = self._left(process, state)
            if left is not CudaState.RUNNING:
                lost[process.pid] = left or "unknown"
                try:
                    kill(process)
                except EngineError as exc:
                    faults.append(str(exc))
        return lost, faults

    def _left(self, process: ProcessRef, state: CudaState) -> CudaState | None:
        """Running, or where it can't be left; None if the driver does not know."""
        doubtful = process in self._doubtful
        try:
            found = self._driver.state(process.pid) if doubtful else state
            only_locked = found is CudaState.LOCKED and (not doubtful or state is CudaState.RUNNING)
            if only_locked:
                self._driver.unlock(process.pid, timeout_s=_RECOVERY_TIMEOUT_S)
                return CudaState.RUNNING
        except CudaError as exc:
            return CudaState(exc.state) if exc.state else None
        return found
