"""What every ExpertGroup keeps: run on the group over TCP, its ranks threads or processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from dynamo_elastic.comm.base import ExpertGroup
from dynamo_elastic.comm.host_group import HostExpertGroup
from dynamo_elastic.errors import PeerLost
from dynamo_elastic.types import Epoch, Rank

T = TypeVar("T")

EPOCH = Epoch(5)
SCRIPT = Path(__file__).with_name("group_process.py")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture
def opened() -> Iterator[Callable[..., list[HostExpertGroup]]]:
    """Opens the groups of all ranks of an epoch; closes them at the end."""
    groups: list[HostExpertGroup] = []

    def open_all(world_size: int, epoch: Epoch = EPOCH) -> list[HostExpertGroup]:
        fresh = [HostExpertGroup(epoch, Rank(r), world_size) for r in range(world_size)]
        groups.extend(fresh)
        return fresh

    yield open_all
    for group in groups:
        group.close()


def addresses_of(groups: list[HostExpertGroup]) -> dict[Rank, str]:
    return {group.rank: group.address for group in groups}


def each(
    pool: ThreadPoolExecutor, groups: list[HostExpertGroup], act: Callable[[HostExpertGroup], T]
) -> list[T]:
    """`act` on every group at once."""
    return [future.result(30) for future in [pool.submit(act, group) for group in groups]]


def connect_all(pool: ThreadPoolExecutor, groups: list[HostExpertGroup]) -> None:
    addresses = addresses_of(groups)
    each(pool, groups, lambda group: group.connect(addresses, timeout_s=10))


Open = Callable[..., list[HostExpertGroup]]


def test_it_is_an_expert_group(opened: Open) -> None:
    group: ExpertGroup = opened(2)[1]
    assert (group.epoch, group.rank, group.world_size) == (EPOCH, 1, 2)
    assert group.masked == frozenset()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_step_in_lockstep(
    opened: Open, pool: ThreadPoolExecutor, world_size: int
) -> None:
    groups = opened(world_size)
    connect_all(pool, groups)

    def run(group: HostExpertGroup) -> None:
        for step in range(30):
            records = group.control(f"{group.rank}:{step}".encode(), timeout_s=10)
            assert records == {r: f"{r}:{step}".encode() for r in range(world_size)}
            mine = {Rank(r): bytes([group.rank, r, step]) for r in range(world_size)}
            got = group.exchange(mine, timeout_s=10)
            assert got == {r: bytes([r, group.rank, step]) for r in range(world_size)}

    each(pool, groups, run)
    assert all(group.masked == frozenset() for group in groups)


def test_large_and_missing_payloads(opened: Open, pool: ThreadPoolExecutor) -> None:
    groups = opened(3)
    connect_all(pool, groups)
    large = bytes(range(256)) * (1 << 16)  # 16 MiB: far more than two sockets hold

    def run(group: HostExpertGroup) -> Mapping[Rank, bytes]:
        return group.exchange({Rank(0): large, Rank(1): large[: group.rank]}, timeout_s=30)

    first, second, third = each(pool, groups, run)
    assert first == {0: large, 1: large, 2: large}
    assert second == {0: b"", 1: large[:1], 2: large[:2]}
    assert third == {0: b"", 1: b"", 2: b""}


def test_arrived_tells_of_the_next_control_record_and_takes_nothing(
    opened: Open, pool: ThreadPoolExecutor
) -> None:
    groups = opened(3)
    assert not groups[0].arrived([Rank(2)])
    connect_all(pool, groups)
    assert groups[0].arrived([])
    assert groups[0].arrived([Rank(0)])
    assert not groups[0].arrived([Rank(1), Rank(2)])

    joiner = pool.submit(groups[2].control, b"joiner", timeout_s=10)
    wait_until(lambda: groups[0].arrived([Rank(2)]))
    assert groups[0].arrived([Rank(2)])
    assert not groups[0].arrived([Rank(1), Rank(2)])

    results = each(pool, groups[:2], lambda group: group.control(b"retained", timeout_s=10))
    assert results[0] == joiner.result(10) == {0: b"retained", 1: b"retained", 2: b"joiner"}
    assert not groups[0].arrived([Rank(2)])


def test_frames_of_a_faster_peer_wait_for_their_turn(
    opened: Open, pool: ThreadPoolExecutor
) -> None:
    slow, fast = opened(2)
    connect_all(pool, [slow, fast])
    ahead = pool.submit(lambda: [fast.control(bytes([i]), timeout_s=10) for i in range(3)])
    for i in range(3):
        wait_until(lambda: slow.arrived([fast.rank]))
        assert slow.control(b"", timeout_s=10)[fast.rank] == bytes([i])
    assert len(ahead.result(10)) == 3


def test_what_a_peer_sent_before_it_went_is_delivered(
    opened: Open, pool: ThreadPoolExecutor
) -> None:
    stays, goes = opened(2)
    connect_all(pool, [stays, goes])
    pool.submit(goes.control, b"last words", timeout_s=10)
    wait_until(lambda: stays.arrived([goes.rank]))
    goes.close()
    assert stays.control(b"", timeout_s=10) == {0: b"", 1: b"last words"}
    assert stays.control(b"", timeout_s=10) == {0: b""}
    assert stays.masked == {goes.rank}


def test_a_lost_peer_is_masked_and_the_others_go_on(opened: Open, pool: ThreadPoolExecutor) -> None:
    groups = opened(3)
    connect_all(pool, groups)
    groups[1].close()
    begun = time.monotonic()
    for _ in range(2):
        results = each(pool, [groups[0], groups[2]], lambda g: g.control(b"x", timeout_s=20))
        assert results == [{0: b"x", 2: b"x"}] * 2
    assert time.monotonic() - begun < 10
    assert groups[0].masked == groups[2].masked == {1}


def test_a_silent_peer_is_masked_at_the_deadline(opened: Open, pool: ThreadPoolExecutor) -> None:
    groups = opened(2)
    connect_all(pool, groups)
    assert groups[0].control(b"x", timeout_s=0.1) == {0: b"x"}
    assert groups[0].masked == {1}
    assert groups[1].control(b"y", timeout_s=10) == {0: b"x", 1: b"y"}
    assert groups[1].masked == {0}


def test_a_peer_out_of_step_is_masked(opened: Open, pool: ThreadPoolExecutor) -> None:
    groups = opened(2)
    connect_all(pool, groups)
    other = pool.submit(groups[1].exchange, {}, timeout_s=10)
    assert groups[0].control(b"x", timeout_s=10) == {0: b"x"}
    assert groups[0].masked == {1}
    assert other.result(10) == {1: b""}


def test_a_peer_that_never_connects_is_named(opened: Open, pool: ThreadPoolExecutor) -> None:
    groups = opened(3)
    addresses = addresses_of(groups)

    def connect(group: HostExpertGroup) -> frozenset[int]:
        with pytest.raises(PeerLost) as caught:
            group.connect(addresses, timeout_s=0.3)
        return caught.value.ranks

    assert each(pool, groups[:2], connect) == [{2}, {2}]


def test_a_peer_that_is_gone_is_named_at_once(opened: Open) -> None:
    groups = opened(2)
    addresses = addresses_of(groups)
    groups[0].close()
    begun = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        groups[1].connect(addresses, timeout_s=30)
    assert caught.value.ranks == {0}
    assert time.monotonic() - begun < 10


def test_strangers_and_other_epochs_are_turned_away(opened: Open, pool: ThreadPoolExecutor) -> None:
    groups, stale = opened(2), opened(2, Epoch(4))
    addresses = addresses_of(groups)
    host, port = addresses[Rank(0)].split(":")
    with socket.create_connection((host, int(port))) as silent, ExitStack() as stack:
        shouting = stack.enter_context(socket.create_connection((host, int(port))))
        shouting.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        mixed = {Rank(0): addresses[Rank(0)], Rank(1): stale[1].address}
        old = pool.submit(stale[1].connect, mixed, timeout_s=20)
        first = pool.submit(groups[0].connect, addresses, timeout_s=20)
        with pytest.raises(PeerLost):
            old.result(10)
        groups[1].connect(addresses, timeout_s=20)
        first.result(10)
        silent.settimeout(10)
        assert silent.recv(1) == b""
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)))


def test_close_frees_an_exchange_and_a_connect_that_wait(
    opened: Open, pool: ThreadPoolExecutor
) -> None:
    groups = opened(2)
    connect_all(pool, groups)
    waiting = pool.submit(groups[0].control, b"x", timeout_s=60)
    lonely = opened(2)[0]
    connecting = pool.submit(lonely.connect, {}, timeout_s=60)
    time.sleep(0.05)  # So that they do wait; were they not yet there, the test would hold too.
    for group in (groups[0], lonely):
        group.close()
        group.close()
    for future in (waiting, connecting):
        with pytest.raises(PeerLost):
            future.result(10)
    with pytest.raises(PeerLost):
        groups[0].control(b"x", timeout_s=1)


def test_close_frees_every_descriptor(opened: Open, pool: ThreadPoolExecutor) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    groups = opened(3)
    connect_all(pool, groups)
    failed = opened(2)
    with pytest.raises(PeerLost):
        failed[1].connect({Rank(0): "no.such.host.invalid:1"}, timeout_s=5)
    groups[1].control(b"x", timeout_s=0.05)
    assert count() > before
    for group in groups + failed:
        group.close()
    assert count() == before


@pytest.mark.parametrize("payload_bytes", [16, 4 << 20])
def test_kill_of_a_peer_in_the_middle_of_an_exchange(
    payload_bytes: int, pool: ThreadPoolExecutor
) -> None:
    with ExitStack() as stack:
        group = HostExpertGroup(EPOCH, Rank(0), 3)
        stack.callback(group.close)
        children = [stack.enter_context(child(r, 3, payload_bytes)) for r in (1, 2)]
        addresses = {0: group.address, 1: line_of(children[0]), 2: line_of(children[1])}
        for process in children:
            assert process.stdin is not None
            process.stdin.write(json.dumps(addresses) + "\n")
            process.stdin.flush()
        group.connect({Rank(r): a for r, a in addresses.items()}, timeout_s=10)
        payload = bytes(payload_bytes)
        for step in range(60):
            if step == 5:
                # Somewhere in what follows: while it sends, receives, or waits.
                threading.Timer(0.01, children[1].kill).start()
            begun = time.monotonic()
            group.control(b"record", timeout_s=20)
            got = group.exchange({Rank(r): payload for r in range(3)}, timeout_s=20)
            assert time.monotonic() - begun < 10
            assert got[Rank(1)] == b"\x01" * payload_bytes
            assert got.get(Rank(2), b"\x02" * payload_bytes) == b"\x02" * payload_bytes
            if group.masked and step > 10:
                break
            time.sleep(0.005)
        assert group.masked == {2}


@contextmanager
def child(rank: int, world_size: int, payload_bytes: int) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, str(SCRIPT), str(rank), str(world_size), str(payload_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)
