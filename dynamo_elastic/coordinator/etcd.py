"""EtcdStore: the Store on a real etcd. With etcd_channel.py and etcd_leases.py the only importer of
an etcd client.

It speaks etcd's own gRPC messages, as `etcd3` ships them, over grpc's asyncio channel: no thread
between a watch event and the task that waits for it, a deadline on every call, and the gRPC status
code of every failure still at hand, which is what tells "not applied" from "outcome unknown".
Endpoints, TLS and passwords are in etcd_channel.py and etcd_access.py, leases in etcd_leases.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from etcd3 import etcdrpc as rpc

from dynamo_elastic.config_sections import EtcdConfig
from dynamo_elastic.coordinator.etcd_access import EtcdAccess
from dynamo_elastic.coordinator.etcd_channel import EtcdChannels, mapped, refusal_of
from dynamo_elastic.coordinator.etcd_leases import LeaseStream
from dynamo_elastic.coordinator.store import (
    MOST_OPS,
    Changed,
    Delete,
    Guard,
    Op,
    Put,
    Versioned,
    Watch,
)
from dynamo_elastic.errors import GuardFailed, SessionLost, StoreUnavailable
from dynamo_elastic.types import LeaseId

_HELD_BACK_BYTES = 1000
"""A reply below this size etcd's gRPC holds back until everything else that could run there has had
its turn, hoping for more to send along."""


class EtcdStore:
    """Store on the etcd at `endpoints` (URLs). Use and close it in one event loop.

    Raises ConfigError for a URL that is not http://host:port, or https:// with a CA.
    """

    def __init__(
        self, endpoints: Sequence[str], access: EtcdAccess | None = None, *, timeout_s: float = 3.0
    ) -> None:
        self._timeout_s = timeout_s
        self._channels = EtcdChannels(endpoints, access or EtcdAccess(), timeout_s=timeout_s)
        self._leases = LeaseStream(self._channels, timeout_s=timeout_s)

    @classmethod
    def of(cls, config: EtcdConfig) -> EtcdStore:
        """The store of a deployment's settings."""
        return cls(config.urls, EtcdAccess.of(config))

    async def get(self, key: str) -> Versioned | None:
        request = rpc.RangeRequest(key=key.encode())
        reply = await self._read(request)
        return _versioned(reply.kvs[0]) if reply.kvs else None

    async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
        reply = await self._read(_prefix_request(prefix))
        return tuple(_versioned(kv) for kv in reply.kvs)

    async def txn(self, guards: Sequence[Guard], ops: Sequence[Op]) -> int:
        request = txn_request(guards, ops)
        reply = await self._call(lambda c: rpc.KVStub(c).Txn, request, write=True)
        if not reply.succeeded:
            raise GuardFailed(f"guards failed: {', '.join(g.key for g in guards)}")
        return int(reply.header.revision)

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[Watch]:
        reply = await self._read(_prefix_request(prefix))
        channel = await self._channels.channel()
        # Its token is good: the read has just renewed it if need be.
        call = rpc.WatchStub(channel).Watch(metadata=self._channels.metadata())
        try:
            await self._start_watch(call, prefix, reply.header.revision + 1)
            yield _EtcdWatch(call, tuple(_versioned(kv) for kv in reply.kvs))
        finally:
            call.cancel()

    async def grant_lease(self, ttl_s: int) -> LeaseId:
        # A lease whose reply was lost runs out by itself: to the caller nothing has happened.
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        reply = await self._call(lambda c: rpc.LeaseStub(c).LeaseGrant, request)
        return LeaseId(reply.ID)

    async def keep_alive(self, lease: LeaseId) -> None:
        await self._leases.renew(lease)

    async def revoke_lease(self, lease: LeaseId) -> None:
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._call(lambda c: rpc.LeaseStub(c).LeaseRevoke, request, write=True)
        except SessionLost:
            return

    async def close(self) -> None:
        self._leases.close()
        await self._channels.close()

    async def _read(self, request: Any) -> Any:
        return await self._call(lambda c: rpc.KVStub(c).Range, request)

    async def _call(
        self, method: Callable[[Any], Any], request: Any, *, write: bool = False
    ) -> Any:
        """One request and its reply. `method`: of a channel."""

        async def send(channel: Any) -> Any:
            call = method(channel)
            return await call(request, timeout=self._timeout_s, metadata=self._channels.metadata())

        return await self._channels.admitted(send, write=write)

    async def _start_watch(self, call: Any, prefix: str, start_revision: int) -> None:
        create = rpc.WatchCreateRequest(
            key=prefix.encode(), range_end=_prefix_end(prefix), start_revision=start_revision
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                with mapped():
                    await call.write(rpc.WatchRequest(create_request=create))
                    created = await call.read()
        except TimeoutError as exc:
            raise StoreUnavailable(f"etcd did not start a watch in {self._timeout_s:g} s") from exc
        if created is grpc.aio.EOF or not created.created or created.canceled:
            why = "" if created is grpc.aio.EOF else created.cancel_reason
            raise refusal_of(why) or StoreUnavailable(f"etcd refused the watch: {why}")


class _EtcdWatch:
    def __init__(self, call: Any, snapshot: tuple[Versioned, ...]) -> None:
        self._call = call
        self._snapshot = snapshot

    @property
    def snapshot(self) -> tuple[Versioned, ...]:
        return self._snapshot

    async def __aiter__(self) -> AsyncIterator[Changed]:
        while True:
            with mapped():
                reply = await self._call.read()
            if reply is grpc.aio.EOF or reply.canceled:
                raise StoreUnavailable("etcd ended the watch")
            for event in reply.events:
                kv = event.kv
                deleted = event.type == event.DELETE
                yield Changed(kv.key.decode(), None if deleted else kv.value, kv.mod_revision)


def _prefix_end(prefix: str) -> bytes:
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _prefix_request(prefix: str) -> Any:
    return rpc.RangeRequest(key=prefix.encode(), range_end=_prefix_end(prefix))


def _versioned(kv: Any) -> Versioned:
    return Versioned(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision)


def txn_request(guards: Sequence[Guard], ops: Sequence[Op]) -> Any:
    """The request for one transaction.

    One that writes something large reads a value back, of what it has written the smallest that
    makes the reply go out at once: without it the reply to a decision that a thousand ranks watch
    goes out behind what they are told.
    """
    success = [_request_op(op) for op in ops]
    sizes = {op.key: len(op.value) for op in ops if isinstance(op, Put)}
    large = [key for key in sizes if sizes[key] >= _HELD_BACK_BYTES]
    if large and len(ops) < MOST_OPS:
        read_back = rpc.RangeRequest(key=min(large, key=sizes.__getitem__).encode())
        success.append(rpc.RequestOp(request_range=read_back))
    return rpc.TxnRequest(compare=[_compare(g) for g in guards], success=success)


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
