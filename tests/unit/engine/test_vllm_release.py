"""What an engine's processes let go of, on real sockets and real shared memory."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_elastic.engine.vllm.release import (
    close_log_files,
    processes_of_session,
    shut_nvml,
    unlink_sockets,
    wait_no_tcp,
)
from dynamo_elastic.errors import EngineError

RELEASE_TCP = """
import select, socket
from dynamo_elastic.engine.vllm.release import release_tcp, wait_no_tcp

listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
inside, outside = socket.socketpair()
poll = select.epoll()
poll.register(listener, select.EPOLLIN)
held = select.poll()
held.register(listener, select.POLLIN)
assert release_tcp() == 2
wait_no_tcp(0.0)
assert poll.poll(0) == [] and held.poll(0) == [], "what polls it must not wake up"
outside.send(b"x")
assert inside.recv(1) == b"x", "sockets within the tree stay"
"""


def test_no_tcp_socket_is_left_and_nobody_who_polls_one_wakes_up() -> None:
    run_python(RELEASE_TCP)


def test_a_socket_that_stays_open_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)),
        pytest.raises(EngineError, match="TCP sockets are still open"),
    ):
        wait_no_tcp(0.0)


UNLINK = """
import multiprocessing, os
from multiprocessing.shared_memory import SharedMemory
from dynamo_elastic.engine.vllm.release import unlink_shared_memory

memory = SharedMemory(create=True, size=64)
memory.buf[:4] = b"kept"
# It is mapped under the name that it was made with, which is gone at once.
lock = multiprocessing.get_context("spawn").Lock()
names = {path.name for path in unlink_shared_memory([os.getpid()])}
assert memory.name.lstrip("/") in names, names
assert any(name.startswith("sem.") for name in names), names
assert bytes(memory.buf[:4]) == b"kept"
with lock:
    assert not lock.acquire(block=False)
assert unlink_shared_memory([os.getpid()]) == ()
os._exit(0)  # what cleans up at the end would miss the names
"""


def run_python(code: str) -> None:
    """In a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_shared_memory_loses_its_name_and_keeps_its_content() -> None:
    run_python(UNLINK)


def test_sockets_of_the_control_directory_lose_their_names(tmp_path: Path) -> None:
    (tmp_path / "boot.log").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        unlink_sockets(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["boot.log"]


class Nvml:
    """Opened so many times."""

    def __init__(self, holders: int) -> None:
        self.holders = holders

    def nvmlShutdown(self) -> int:
        if self.holders == 0:
            return 1
        self.holders -= 1
        return 0


def test_nvml_is_shut_down_for_all_who_opened_it() -> None:
    nvml = Nvml(3)
    assert shut_nvml(nvml) == 3
    assert shut_nvml(nvml) == 0


def test_a_log_file_is_closed_and_opened_again_by_its_next_line(tmp_path: Path) -> None:
    path = tmp_path / "jit.log"
    logger = logging.Logger("as FlashInfer makes its own")  # noqa: LOG001 - that is the case
    logger.addHandler(logging.FileHandler(path))
    try:
        logger.warning("before")
        assert close_log_files() >= 1
        assert not [p for p in Path("/proc/self/fd").iterdir() if p.resolve() == path]
        logger.warning("after")
        assert path.read_text().splitlines() == ["before", "after"]
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers.clear()


def test_the_session_is_found() -> None:
    assert os.getpid() in processes_of_session()
