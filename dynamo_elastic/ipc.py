"""Calls over a unix socket between processes of one host, on aiohttp.

One POST a call, JSON both ways, a deadline on every call, typed errors carried across. The server
asks the kernel who is calling: only root, its own user and those it was told of may.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from dynamo_elastic import errors
from dynamo_elastic.errors import CallerRefused, ElasticError, EngineError, EngineGone

Handler = Callable[[dict[str, Any]], Awaitable[Any]]
StreamHandler = Callable[[dict[str, Any]], AsyncIterator[Any]]
RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 << 20
_CONNECT_TIMEOUT_S = 2.0
_SO_PEERGROUPS = 59
_MOST_BYTES = 1024


_BAD_REQUEST = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a body raises that is not what the call needs: its numbers may be infinite, and what
is in it nested without end."""


@dataclass(frozen=True, slots=True)
class Callers:
    """Who may call a server, besides root and the user it runs as: these users, and the members of
    one group, but not `reserved` calls. The socket lets them in; so must its directory."""

    uids: tuple[int, ...] = ()
    gid: int | None = None
    reserved: frozenset[str] = frozenset()

    def admit(self, peer: socket.socket, call: str) -> None:
        """Return if the process at the other end may make that call. Raises CallerRefused."""
        size = struct.calcsize("3i")
        _, uid, gid = struct.unpack(
            "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if uid in (0, os.geteuid()):
            return
        owners = ["root", f"uid {os.geteuid()}"]
        if call in self.reserved:
            raise CallerRefused(f"uid {uid} may not call {call}: only {', '.join(owners)}")
        if uid in self.uids or (self.gid is not None and self.gid in (gid, *_groups(peer))):
            return
        others = [f"uid {other}" for other in self.uids]
        others += [f"group {self.gid}"] if self.gid is not None else []
        allowed = ", ".join([*owners, *others])
        raise CallerRefused(f"uid {uid} may not call this socket: only {allowed}")

    def own(self, path: Path) -> None:
        """The socket at `path` lets them in, and, where its mode can say so, nobody else."""
        if len(self.uids) > 1:
            path.chmod(0o666)  # a mode knows one user: admit() tells the others apart
            return
        (uid,) = self.uids or (-1,)
        if uid >= 0 or self.gid is not None:
            os.chown(path, uid, -1 if self.gid is None else self.gid)
        path.chmod(0o600 if self.gid is None else 0o660)


def _groups(peer: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the process at the other end; () if they are too many to tell."""
    try:
        raw = peer.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


class RpcServer:
    """Serves named calls on a unix socket. Close it to remove the socket."""

    def __init__(
        self,
        path: Path,
        calls: Mapping[str, Handler],
        streams: Mapping[str, StreamHandler] | None = None,
        callers: Callers | None = None,
    ) -> None:
        self._path = path
        self._callers = callers or Callers()
        self._calls = calls
        self._streams = streams or {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Bind and serve. A socket that is left over from a dead process is replaced."""
        # Not by a middleware: aiohttp would cache it, and so this server, for the whole process.
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/call/{name}", self._admitted(self._call))
        app.router.add_post("/stream/{name}", self._admitted(self._stream))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._path.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self._path)).start()
        self._callers.own(self._path)

    async def close(self) -> None:
        """Stop serving; calls under way get a second to end. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            self._path.unlink(missing_ok=True)

    def _admitted(self, handler: RequestHandler) -> RequestHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            peer = request.transport.get_extra_info("socket") if request.transport else None
            if peer is None:
                raise web.HTTPForbidden
            try:
                self._callers.admit(peer, request.match_info["name"])
            except CallerRefused as exc:
                return _failure(exc, 403)
            return await handler(request)

        return handle

    async def _call(self, request: web.Request) -> web.Response:
        handler = self._calls.get(request.match_info["name"])
        if handler is None:
            return _failure(EngineError(f"no such call: {request.match_info['name']}"), 404)
        try:
            return web.json_response({"result": await handler(await request.json())})
        except ElasticError as exc:
            return _failure(exc, 409)
        except _BAD_REQUEST as exc:
            return _failure(EngineError(f"bad request: {type(exc).__name__}: {exc}"), 400)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        handler = self._streams.get(request.match_info["name"])
        if handler is None:
            return _failure(EngineError(f"no such stream: {request.match_info['name']}"), 404)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        async for item in handler(await request.json()):
            await response.write(json.dumps(item).encode() + b"\n")
        return response


def _failure(exc: ElasticError, status: int) -> web.Response:
    body = {"error": type(exc).__name__, "message": str(exc)}
    body["took_effect"] = str(int(getattr(exc, "took_effect", False)))
    return web.json_response(body, status=status)


class RpcClient:
    """Calls a server on a unix socket. Owns one connection pool; close it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(self, name: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The result of `name`. Raises the server's typed error (EngineError if its constructor
        needs more than a message), or EngineGone if the server can't be reached or does not answer
        in `timeout_s`; then whether the call took effect is unknown."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._open().post(
                f"http://unix/call/{name}", json=dict(params), timeout=timeout
            ) as response:
                body = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as exc:
            raise EngineGone(
                f"{name} on {self._path.name}: {str(exc) or type(exc).__name__}"
            ) from exc
        if "error" in body:
            raise _remote_error(body)
        return body["result"]

    @asynccontextmanager
    async def stream(
        self, name: str, params: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """Items of a stream as they come; EngineGone is raised from the iterator when it breaks."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._open().post(
                f"http://unix/stream/{name}", json=dict(params), timeout=timeout
            ) as response:
                yield _lines(response, name)
        except (aiohttp.ClientError, OSError) as exc:
            raise EngineGone(f"{name} on {self._path.name}: {exc}") from exc

    async def close(self) -> None:
        """Close the connections; to who calls from now on the server is gone. Idempotent."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineGone(f"nobody asks {self._path.name} any more: its client is closed")
        if self._session is None:
            connector = aiohttp.UnixConnector(path=str(self._path))
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


async def _lines(response: aiohttp.ClientResponse, name: str) -> AsyncIterator[Any]:
    try:
        async for line in response.content:
            yield json.loads(line)
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        raise EngineGone(f"stream {name} broke: {exc}") from exc


def _remote_error(body: Mapping[str, Any]) -> ElasticError:
    kind = getattr(errors, str(body["error"]), EngineError)
    message = str(body.get("message", ""))
    if isinstance(kind, type) and issubclass(kind, EngineError):
        return kind(message, took_effect=body.get("took_effect") == "1")
    simple = (errors.TargetRefused, errors.LeadershipLost, errors.StaleCommand)
    if isinstance(kind, type) and issubclass(kind, simple):
        return kind(message)
    return EngineError(f"{body['error']}: {message}")


async def wait_for_socket(path: Path, *, timeout_s: float) -> None:
    """Return once something listens on `path`. Raises EngineGone after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while loop.time() < deadline:
        try:
            _, writer = await asyncio.open_unix_connection(str(path))
        except OSError:
            await asyncio.sleep(0.005)
            continue
        writer.close()
        return
    raise EngineGone(f"nothing listens on {path} after {timeout_s:g} s")
