"""Who may call the agent: the kernel says who it is, the answer says who may."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.server import _OPERATORS
from dynamo_elastic.ipc import Callers, RpcServer

pytestmark = pytest.mark.root

NOBODY, NOGROUP, OTHERS = 65534, 65534, 54321

CALL = """
import asyncio, os, sys
from pathlib import Path
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.ipc import RpcClient
os.setgroups([int(g) for g in sys.argv[4].split(",") if g])
os.setgid(int(sys.argv[3]))
os.setuid(int(sys.argv[2]))
async def main():
    client = RpcClient(Path(sys.argv[1]))
    try:
        print(await client.call(sys.argv[5], {}, timeout_s=30))
    except ElasticError as exc:
        print(type(exc).__name__, exc)
    await client.close()
asyncio.run(main())
"""


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        os.chmod(directory, 0o711)
        yield Path(directory) / "s.sock"


def ask(
    path: Path,
    callers: Callers,
    uid: int,
    gid: int,
    *groups: int,
    mode: int = 0,
    call: str = "hello",
) -> str:
    """What a process of that user hears."""

    async def hello(_: dict[str, object]) -> str:
        return "hello"

    async def main() -> str:
        server = RpcServer(path, {"hello": hello, "stop_all": hello}, callers=callers)
        await server.start()
        if mode:
            path.chmod(mode)
        argv = [sys.executable, "-c", CALL, str(path), str(uid), str(gid)]
        argv += [",".join(map(str, groups)), call]
        try:
            done = await asyncio.to_thread(
                subprocess.run, argv, capture_output=True, text=True, timeout=60, check=True
            )
        finally:
            await server.close()
        return done.stdout.strip()

    return asyncio.run(main())


def test_root_may(path: Path) -> None:
    assert ask(path, Callers(), 0, 0) == "hello"


def test_others_can_not_even_connect(path: Path) -> None:
    assert "Permission denied" in ask(path, Callers(), NOBODY, NOGROUP)


def test_others_are_refused_by_name_should_the_mode_let_them_in(path: Path) -> None:
    told = ask(path, Callers(uids=(OTHERS,), gid=OTHERS), NOBODY, NOGROUP, mode=0o666)
    refusal = f"uid {NOBODY} may not call this socket: only root, uid 0, uid {OTHERS}"
    assert told == f"CallerRefused {refusal}, group {OTHERS}"


def test_the_configured_user_may(path: Path) -> None:
    assert ask(path, Callers(uids=(NOBODY,)), NOBODY, NOGROUP) == "hello"


@pytest.mark.parametrize("groups", [(OTHERS,), (1, OTHERS)])
def test_members_of_the_configured_group_may(path: Path, groups: tuple[int, ...]) -> None:
    assert ask(path, Callers(gid=OTHERS), NOBODY, NOGROUP, *groups) == "hello"
    assert ask(path, Callers(gid=OTHERS), NOBODY, OTHERS) == "hello"


def test_several_users_may_and_nobody_else(path: Path) -> None:
    callers = Callers(uids=(OTHERS, NOBODY))
    assert ask(path, callers, NOBODY, NOGROUP) == "hello"
    assert ask(path, callers, OTHERS, OTHERS) == "hello"
    told = ask(path, callers, OTHERS + 1, OTHERS)
    assert told.startswith(f"CallerRefused uid {OTHERS + 1} may not call this socket: only root")


@pytest.mark.parametrize("callers", [{"uids": (NOBODY,)}, {"gid": NOGROUP}])
def test_operators_calls_are_for_root(path: Path, callers: dict[str, Any]) -> None:
    reserved = Callers(**callers, reserved=frozenset({"stop_all"}))
    assert ask(path, reserved, NOBODY, NOGROUP) == "hello"
    told = ask(path, reserved, NOBODY, NOGROUP, call="stop_all")
    assert told == f"CallerRefused uid {NOBODY} may not call stop_all: only root, uid 0"
    assert ask(path, reserved, 0, 0, call="stop_all") == "hello"


def test_the_agents_own_calls_that_end_what_is_others() -> None:
    assert {"evict", "drain", "undrain", "stop_all"} == _OPERATORS
