"""EtcdStore: the Store on a real etcd, and the only importer of an etcd client.

It speaks etcd's own gRPC messages, as `etcd3` ships them, over grpc's asyncio channel: no thread
between a watch event and the task that waits for it, a deadline on every call, and the gRPC status
code of every failure still at hand, which is what tells "not applied" from "outcome unknown".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
from etcd3 import etcdrpc as rpc
from grpc import StatusCode

from dynamo_elastic.coordinator.store import (
    Changed,
    Delete,
    Guard,
    Op,
    Put,
    Versioned,
    Watch,
)
from dynamo_elastic.errors import (
    ConfigError,
    GuardFailed,
    OutcomeUnknown,
    SessionLost,
    StoreUnavailable,
)
from dynamo_elastic.types import LeaseId

# With these codes etcd (or our own channel) may have passed the request on before it failed.
_MAYBE_APPLIED = frozenset(
    {
        StatusCode.ABORTED,
        StatusCode.CANCELLED,
        StatusCode.DATA_LOSS,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.INTERNAL,
        StatusCode.UNAVAILABLE,
        StatusCode.UNKNOWN,
    }
)

_CONNECT_POLL_S = 0.005

_CHANNEL_OPTIONS = (
    # The store is on our own network: a proxy of the environment is never right.
    ("grpc.enable_http_proxy", 0),
    # A watch on a peer that vanished without a FIN breaks in 13 s. etcd refuses pings under 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Back within a second of etcd's return; grpc's own backoff grows to two minutes. The "min" is
    # also how long one attempt to connect may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
)


class EtcdStore:
    """Store on the etcd at `endpoints` (URLs). Use and close it in one event loop.

    One endpoint is used until it can't be reached; then the next. Raises ConfigError for a URL that
    is not http://host:port.
    """

    def __init__(self, endpoints: Sequence[str], *, timeout_s: float = 3.0) -> None:
        self._targets = tuple(_target(url) for url in endpoints)
        self._timeout_s = timeout_s
        self._channels: list[Any] = []
        self._current = 0

    async def get(self, key: str) -> Versioned | None:
        request = rpc.RangeRequest(key=key.encode())
        reply = await self._read(request)
        return _versioned(reply.kvs[0]) if reply.kvs else None

    async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
        reply = await self._read(_prefix_request(prefix))
        return tuple(_versioned(kv) for kv in reply.kvs)

    async def txn(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        request = rpc.TxnRequest(
            compare=[_compare(g) for g in guards], success=[_request_op(op) for op in ops]
        )
        channel = await self._channel()
        with _mapped(write=True):
            reply = await rpc.KVStub(channel).Txn(request, timeout=self._timeout_s)
        if not reply.succeeded:
            raise GuardFailed(f"guards failed: {', '.join(g.key for g in guards)}")
        return int(reply.header.revision)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[Watch]:
        channel = await self._channel()
        with _mapped():
            reply = await rpc.KVStub(channel).Range(
                _prefix_request(prefix), timeout=self._timeout_s
            )
        call = rpc.WatchStub(channel).Watch()
        try:
            await self._start_watch(call, prefix, reply.header.revision + 1)
            yield _EtcdWatch(call, tuple(_versioned(kv) for kv in reply.kvs))
        finally:
            call.cancel()

    async def grant_lease(self, ttl_s: int) -> LeaseId:
        channel = await self._channel()
        # A lease whose reply was lost runs out by itself: to the caller nothing has happened.
        with _mapped():
            reply = await rpc.LeaseStub(channel).LeaseGrant(
                rpc.LeaseGrantRequest(TTL=ttl_s), timeout=self._timeout_s
            )
        return LeaseId(reply.ID)

    async def keep_alive(self, lease: LeaseId) -> None:
        channel = await self._channel()
        with _mapped():
            call = rpc.LeaseStub(channel).LeaseKeepAlive(timeout=self._timeout_s)
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                reply = await call.read()
            finally:
                call.cancel()
        if reply is grpc.aio.EOF:
            raise StoreUnavailable("etcd ended the keep-alive stream")
        if reply.TTL <= 0:
            raise SessionLost(f"lease {lease:x} has run out")

    async def revoke_lease(self, lease: LeaseId) -> None:
        channel = await self._channel()
        try:
            with _mapped(write=True):
                await rpc.LeaseStub(channel).LeaseRevoke(
                    rpc.LeaseRevokeRequest(ID=lease), timeout=self._timeout_s
                )
        except SessionLost:
            return

    async def close(self) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    async def _read(self, request: Any) -> Any:
        channel = await self._channel()
        with _mapped():
            return await rpc.KVStub(channel).Range(request, timeout=self._timeout_s)

    async def _channel(self) -> Any:
        """A connected channel, the one in use first. Raises StoreUnavailable if there is none.

        A request is only ever sent on a channel that is connected: so a store that is down is told
        from a reply that was lost by where the call failed, not by the text of its error.
        """
        if not self._channels:
            self._channels = [
                grpc.aio.insecure_channel(t, options=_CHANNEL_OPTIONS) for t in self._targets
            ]
        share_s = self._timeout_s / len(self._channels)
        for _ in self._channels:
            channel = self._channels[self._current]
            if await _connected(channel, share_s):
                return channel
            self._current = (self._current + 1) % len(self._channels)
        raise StoreUnavailable(f"etcd can't be reached at {', '.join(self._targets)}")

    async def _start_watch(self, call: Any, prefix: str, start_revision: int) -> None:
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=_prefix_end(prefix), start_revision=start_revision
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                with _mapped():
                    await call.write(rpc.WatchRequest(create_request=create))
                    created = await call.read()
        except TimeoutError as exc:
            raise StoreUnavailable(f"etcd did not start a watch in {self._timeout_s:g} s") from exc
        if created is grpc.aio.EOF or not created.created or created.canceled:
            raise StoreUnavailable("etcd refused the watch")


class _EtcdWatch:
    def __init__(self, call: Any, snapshot: tuple[Versioned, ...]) -> None:
        self._call = call
        self._snapshot = snapshot

    @property
    def snapshot(self) -> tuple[Versioned, ...]:
        return self._snapshot

    async def __aiter__(self) -> AsyncIterator[Changed]:
        while True:
            with _mapped():
                reply = await self._call.read()
            if reply is grpc.aio.EOF or reply.canceled:
                raise StoreUnavailable("etcd ended the watch")
            for event in reply.events:
                kv = event.kv
                deleted = event.type == event.DELETE
                yield Changed(kv.key.decode(), None if deleted else kv.value, kv.mod_revision)


async def _connected(channel: Any, timeout_s: float) -> bool:
    """True once `channel` is connected; False after `timeout_s`."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    # Asked, not awaited: a wait for the next state that is given up stays behind in grpc's queue
    # and may complete after our loop has ended.
    while channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
        if clock() >= deadline_s:
            return False
        await asyncio.sleep(_CONNECT_POLL_S)
    return True


@contextmanager
def _mapped(*, write: bool = False) -> Iterator[None]:
    """Map every failure of one gRPC call to our errors; `write` if it could change something."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        code, details = exc.code(), exc.details()
        message = f"etcd: {code.name}: {details}"
        if code is StatusCode.NOT_FOUND:
            raise SessionLost(f"etcd: {details}") from exc
        if code is StatusCode.INVALID_ARGUMENT:
            raise ValueError(message) from exc
        if write and code in _MAYBE_APPLIED:
            raise OutcomeUnknown(message) from exc
        raise StoreUnavailable(message) from exc
    except (grpc.aio.UsageError, asyncio.CancelledError) as exc:
        # grpc raises these too when its channel is closed under a call; a task that really is
        # being cancelled must see its cancellation.
        task = asyncio.current_task()
        if isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        kind = OutcomeUnknown if write else StoreUnavailable
        raise kind("etcd: the store was closed during a call") from exc


def _target(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ConfigError([f"etcd.endpoints: {url!r} is not http://host:port; correct it"])
    return f"{parts.hostname}:{parts.port}"


def _prefix_end(prefix: str) -> bytes:
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _prefix_request(prefix: str) -> Any:
    return rpc.RangeRequest(key=prefix.encode(), range_end=_prefix_end(prefix))


def _versioned(kv: Any) -> Versioned:
    return Versioned(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision)


def _compare(guard: Guard) -> Any:
    return rpc.Compare(
        key=guard.key.encode(),
        result=rpc.Compare.EQUAL,
        target=rpc.Compare.MOD,
        mod_revision=guard.mod_revision,
    )


def _request_op(op: Op) -> Any:
    if isinstance(op, Put):
        put = rpc.PutRequest(key=op.key.encode(), value=op.value, lease=op.lease or 0)
        return rpc.RequestOp(request_put=put)
    if isinstance(op, Delete):
        request = rpc.DeleteRangeRequest(key=op.key.encode())
    else:
        request = rpc.DeleteRangeRequest(key=op.prefix.encode(), range_end=_prefix_end(op.prefix))
    return rpc.RequestOp(request_delete_range=request)
