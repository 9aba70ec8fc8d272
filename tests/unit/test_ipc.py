"""Calls over a unix socket: results, typed errors, deadlines, streams."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.errors import EngineError, EngineGone, StaleCommand, TransferError
from dynamo_elastic.ipc import RpcClient, RpcServer, wait_for_socket


async def echo(params: dict[str, Any]) -> Any:
    return params


async def refuse(params: dict[str, Any]) -> Any:
    raise EngineError("the rank drains", took_effect=True)


async def stale(params: dict[str, Any]) -> Any:
    raise StaleCommand("token 3 is older than 5")


async def broken_stream(params: dict[str, Any]) -> Any:
    raise TransferError("no route", remote="a-1", bytes_done=7)


async def bad(params: dict[str, Any]) -> Any:
    return params["absent"]


async def never(params: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


async def count(params: dict[str, Any]) -> AsyncIterator[Any]:
    for i in range(params["to"]):
        yield {"i": i}


CALLS = {"echo": echo, "refuse": refuse, "stale": stale, "transfer": broken_stream, "bad": bad}


def with_server(path: Path, body: Any) -> Any:
    async def run() -> Any:
        server = RpcServer(path, {**CALLS, "never": never}, {"count": count})
        await server.start()
        client = RpcClient(path)
        try:
            return await body(client)
        finally:
            await client.close()
            await server.close()

    return asyncio.run(run())


def test_a_result_comes_back_and_the_socket_goes(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"

    async def body(client: RpcClient) -> Any:
        assert path.stat().st_mode & 0o777 == 0o600
        return await client.call("echo", {"a": [1, "x"]}, timeout_s=5)

    assert with_server(path, body) == {"a": [1, "x"]}
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("refuse", EngineError, "the rank drains"),
        ("stale", StaleCommand, "older than 5"),
        ("transfer", EngineError, "TransferError: no route"),
        ("bad", EngineError, "bad request: KeyError"),
        ("unknown", EngineError, "no such call"),
    ],
)
def test_errors_come_across_by_type(
    tmp_path: Path, name: str, kind: type[Exception], says: str
) -> None:
    async def body(client: RpcClient) -> None:
        with pytest.raises(kind, match=says):
            await client.call(name, {}, timeout_s=5)

    with_server(tmp_path / "s.sock", body)


def test_an_error_says_whether_it_took_effect(tmp_path: Path) -> None:
    async def body(client: RpcClient) -> None:
        with pytest.raises(EngineError) as caught:
            await client.call("refuse", {}, timeout_s=5)
        assert caught.value.took_effect

    with_server(tmp_path / "s.sock", body)


def test_a_call_that_is_not_answered_ends_at_its_deadline(tmp_path: Path) -> None:
    async def body(client: RpcClient) -> None:
        with pytest.raises(EngineGone):
            await client.call("never", {}, timeout_s=0.05)

    with_server(tmp_path / "s.sock", body)


def test_a_stream_comes_in_order(tmp_path: Path) -> None:
    async def body(client: RpcClient) -> list[int]:
        async with client.stream("count", {"to": 4}) as items:
            return [item["i"] async for item in items]

    assert with_server(tmp_path / "s.sock", body) == [0, 1, 2, 3]


def test_a_server_that_was_closed_is_forgotten(tmp_path: Path) -> None:
    """An engine has one in each of its lives."""

    class Served:
        async def echo(self, params: dict[str, Any]) -> Any:
            return params

    async def life() -> weakref.ref[Served]:
        served = Served()
        server = RpcServer(tmp_path / "s.sock", {"echo": served.echo})
        await server.start()
        client = RpcClient(tmp_path / "s.sock")
        await client.call("echo", {}, timeout_s=5)
        await client.close()
        await server.close()
        return weakref.ref(served)

    before = asyncio.run(life())
    gc.collect()
    assert before() is None


def test_to_who_calls_while_the_client_is_closed_the_server_is_gone(tmp_path: Path) -> None:
    """A shell asks its engine how busy it is, and parks it meanwhile."""

    async def body(client: RpcClient) -> None:
        await client.call("echo", {}, timeout_s=5)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(EngineGone):
                await client.call("echo", {}, timeout_s=5)
            await closing

    with_server(tmp_path / "s.sock", body)


def test_nobody_listening_is_engine_gone(tmp_path: Path) -> None:
    async def run() -> None:
        client = RpcClient(tmp_path / "none.sock")
        with pytest.raises(EngineGone):
            await client.call("echo", {}, timeout_s=1)
        await client.close()
        with pytest.raises(EngineGone, match="nothing listens"):
            await wait_for_socket(tmp_path / "none.sock", timeout_s=0.02)

    asyncio.run(run())
