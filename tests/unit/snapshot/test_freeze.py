"""Several processes at once: after any failure each of them runs or was killed, and the error says
which."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_elastic.errors import CudaError, CudaTimeout, ProcessesLost
from dynamo_elastic.failpoints import set_hook
from dynamo_elastic.snapshot.base import CudaOperation, CudaState
from dynamo_elastic.snapshot.freeze import freeze, thaw
from dynamo_elastic.snapshot.process import ProcessRef
from dynamo_elastic.testing.cuda import CODES, GIB, FakeGpuHost, fake_gpus

A, B, C = (ProcessRef(pid, 1) for pid in (11, 12, 13))


class Host:
    """Three processes and what became of them."""

    def __init__(self) -> None:
        self.killed: set[int] = set()
        self.gpus = FakeGpuHost(fake_gpus(1), kill=self.killed.add)
        for process in (A, B, C):
            self.gpus.start(process.pid)

    def kill(self, process: ProcessRef) -> None:
        self.killed.add(process.pid)
        self.gpus.processes.pop(process.pid, None)

    def states(self) -> dict[int, CudaState]:
        return {pid: process.state for pid, process in self.gpus.processes.items()}

    def freeze(self) -> None:
        freeze((A, B, C), self.gpus, timeout_s=1, kill=self.kill)

    def thaw(self) -> None:
        thaw((A, B, C), self.gpus, timeout_s=1, kill=self.kill)


@pytest.fixture
def host() -> Host:
    return Host()


def test_all_are_locked_before_one_is_checkpointed_and_restored_before_one_is_unlocked(
    host: Host,
) -> None:
    host.freeze()
    host.thaw()
    expected = [(operation, process.pid) for operation in CudaOperation for process in (A, B, C)]
    assert host.gpus.calls == expected
    assert set(host.states().values()) == {CudaState.RUNNING}


def test_one_that_can_not_be_locked_changes_nothing(host: Host) -> None:
    host.gpus.processes[B.pid].busy = True
    with pytest.raises(CudaTimeout) as caught:
        host.freeze()
    assert caught.value.pid == B.pid
    assert host.killed == set()
    assert set(host.states().values()) == {CudaState.RUNNING}


def test_failed_checkpoint_loses_those_that_left_and_unlocks_the_others(host: Host) -> None:
    host.gpus.processes[B.pid].fails_in[CudaOperation.CHECKPOINT] = (
        "CUDA_ERROR_UNKNOWN",
        CudaState.FAILED,
    )
    with pytest.raises(ProcessesLost, match="CUDA_ERROR_UNKNOWN") as caught:
        host.freeze()
    assert caught.value.states == {A.pid: "checkpointed", B.pid: "failed"}
    assert host.killed == {A.pid, B.pid}
    assert host.states() == {C.pid: CudaState.RUNNING}


def test_hung_checkpoint_has_killed_its_process(host: Host) -> None:
    host.gpus.processes[A.pid].hangs_in.add(CudaOperation.CHECKPOINT)
    with pytest.raises(ProcessesLost) as caught:
        host.freeze()
    assert caught.value.states == {A.pid: "unknown"}
    assert host.states() == {B.pid: CudaState.RUNNING, C.pid: CudaState.RUNNING}


def test_failed_restore_is_for_good(host: Host) -> None:
    host.gpus.processes[B.pid].ipc_imports = 1
    host.freeze()
    with pytest.raises(ProcessesLost) as caught:
        host.thaw()
    assert caught.value.states == {B.pid: "checkpointed", C.pid: "checkpointed"}
    assert host.states() == {A.pid: CudaState.RUNNING}


def test_memory_that_is_short_fails_the_restore(host: Host) -> None:
    host.freeze()
    host.gpus.start(99, used_bytes=79 * GIB)
    with pytest.raises(ProcessesLost, match="OUT_OF_MEMORY"):
        host.thaw()
    assert host.killed == {B.pid, C.pid}


def test_interrupt_between_two_calls_leaves_no_process_behind(host: Host) -> None:
    def interrupt(name: str) -> None:
        if name == "cuda.checkpoint":
            raise KeyboardInterrupt

    set_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            host.freeze()
    finally:
        set_hook(None)
    assert host.killed == {A.pid}
    assert host.states() == {B.pid: CudaState.RUNNING, C.pid: CudaState.RUNNING}


FAULT = st.tuples(
    st.sampled_from((A, B, C)),
    st.sampled_from(list(CudaOperation)),
    st.sampled_from(sorted(CODES)),
    st.sampled_from(list(CudaState)),
)


class FreezeMachine(RuleBasedStateMachine):
    """Freeze and thaw, with faults in any call that leave the process in any state."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host()
        self.frozen = False

    @rule(fault=FAULT, hangs=st.booleans())
    def plant(self, fault: tuple[ProcessRef, CudaOperation, str, CudaState], hangs: bool) -> None:
        process, operation, name, state = fault
        found = self.host.gpus.processes.get(process.pid)
        if found is None:
            return
        if hangs:
            found.hangs_in.add(operation)
        else:
            found.fails_in[operation] = (name, state)

    @precondition(lambda self: not self.frozen)
    @rule()
    def freeze(self) -> None:
        self.frozen = self.succeeds(freeze, CudaState.CHECKPOINTED)

    @precondition(lambda self: self.frozen)
    @rule()
    def thaw(self) -> None:
        self.succeeds(thaw, CudaState.RUNNING)
        self.frozen = False

    def succeeds(self, act: Callable[..., object], after: CudaState) -> bool:
        host = self.host
        members = [p for p in (A, B, C) if p.pid in host.gpus.processes]
        host.killed.clear()
        lost: set[int] = set()
        failed = True
        try:
            act(members, host.gpus, timeout_s=1, kill=host.kill)
            failed = False
        except ProcessesLost as exc:
            lost = set(exc.states)
        except CudaError:
            pass  # then nothing may be lost
        assert host.killed == lost
        assert set(host.states().values()) <= {CudaState.RUNNING if failed else after}
        return not failed

    @invariant()
    def nothing_stands_between(self) -> None:
        wanted = CudaState.CHECKPOINTED if self.frozen else CudaState.RUNNING
        assert set(self.host.states().values()) <= {wanted}


TestFreezeMachine = FreezeMachine.TestCase
TestFreezeMachine.settings = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
