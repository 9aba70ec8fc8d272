"""Groups over gloo, their vote and their weights, between real processes that die or stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ReduceOp

from dynamo_elastic.engine.vllm.elastic.groups import (
    Verdict,
    agree,
    close_gloo,
    connect_gloo,
    expect_steps,
    open_store,
    reduce,
)
from dynamo_elastic.engine.vllm.elastic.meeting import GivenUp, Meeting

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def port(store: TCPStore) -> int:
    found: int = store.port
    return found


def joined(port: int, name: str, rank: int, size: int) -> ProcessGroup:
    meeting = Meeting(open_store(HOST, port, TIMEOUT_S), timeout_s=TIMEOUT_S)
    meeting.meet(name, rank, range(size))
    store: Any = meeting.store
    return connect_gloo(store, name, rank, size, TIMEOUT_S)


def all_of(*acts: Callable[[], Any]) -> list[Any]:
    """What they return, run at the same time."""
    with ThreadPoolExecutor(len(acts)) as pool:
        return [future.result() for future in [pool.submit(act) for act in acts]]


def two_that_serve(port: int) -> list[ProcessGroup]:
    return all_of(*(lambda r=r: joined(port, "old", r, 2) for r in (0, 1)))


def joiner(port: int, fault: str, ready: Any) -> None:
    """Joins as rank 2 of 3, says so, and takes part in the exchange unless it has a fault."""
    group = joined(port, "new", 2, 3)
    ready.set()
    if fault == "dies":
        os._exit(9)
    if fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    reduce(group, [0, 0, 0], ReduceOp.MAX, TIMEOUT_S)


@pytest.fixture
def spawn(port: int) -> Iterator[Callable[[str], Any]]:
    context = multiprocessing.get_context("spawn")
    started = []

    def start(fault: str) -> Any:
        ready = context.Event()
        process = context.Process(target=joiner, args=(port, fault, ready), daemon=True)
        process.start()
        started.append(process)
        return ready

    yield start
    for process in started:
        process.kill()
        process.join(10)


def verdicts(old: list[ProcessGroup], new: list[ProcessGroup]) -> list[Verdict]:
    def vote(rank: int) -> Verdict:
        return agree(old[rank], new[rank], [1, rank, 5], new_timeout_s=1.0, old_timeout_s=TIMEOUT_S)

    return all_of(*(lambda r=r: vote(r) for r in (0, 1)))


@pytest.mark.parametrize(
    ("fault", "commits"),
    [("", True), ("dies", False), pytest.param("stops", False, marks=pytest.mark.slow)],
)
def test_those_who_serve_decide_alike(
    port: int, spawn: Callable[[str], Any], fault: str, commits: bool
) -> None:
    old = two_that_serve(port)
    ready = spawn(fault)
    new = all_of(*(lambda r=r: joined(port, "new", r, 3) for r in (0, 1)))
    assert ready.wait(60)
    votes = verdicts(old, new)
    assert [vote.commits for vote in votes] == [commits, commits]
    if commits:
        assert [vote.values for vote in votes] == [[1, 1, 5]] * 2
    else:
        assert all("new group failed" in vote.reason for vote in votes)
    for group in new:
        close_gloo(group)
    # Whatever came of it, the old group is as good as before.
    assert all_of(*(lambda r=r: reduce(old[r], [r], ReduceOp.MAX, 5) for r in (0, 1))) == [[1], [1]]


def test_a_peer_that_does_not_come_to_a_step_fails_it_in_time(port: int) -> None:
    """torch.distributed gives no deadline, and neither does vLLM, whose workers exchange so."""
    group, _ = two_that_serve(port)
    expect_steps(group, timedelta(seconds=0.3))
    began_s = time.monotonic()
    with pytest.raises(RuntimeError):
        torch.distributed.all_reduce(torch.zeros(4, dtype=torch.int32), group=group)
    assert time.monotonic() - began_s < TIMEOUT_S


def test_a_group_that_one_rank_never_joins_is_not_made(port: int) -> None:
    meeting = Meeting(open_store(HOST, port, TIMEOUT_S), timeout_s=0.3)
    with pytest.raises(GivenUp, match="at/engines/1"):
        meeting.meet("engines", 0, [0, 1])


def test_no_store_is_an_error_in_time() -> None:
    with pytest.raises(RuntimeError):
        open_store(HOST, 9, 0.5)
