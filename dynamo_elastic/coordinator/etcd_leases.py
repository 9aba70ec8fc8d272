"""Renewals of a client's leases, over one long stream: opening a stream for each costs etcd and the
client several times as much, and a deployment of n ranks renews n leases every few seconds."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from etcd3 import etcdrpc as rpc

from dynamo_elastic.coordinator.etcd_channel import EtcdChannels
from dynamo_elastic.errors import SessionLost, StoreUnavailable
from dynamo_elastic.types import LeaseId


class LeaseStream:
    """One renewal at a time. A stream that has not answered is given up, and the next renewal opens
    another: so an answer is always the one to the question before it."""

    def __init__(self, channels: EtcdChannels, *, timeout_s: float) -> None:
        self._channels = channels
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._channel: Any = None
        self._call: Any = None

    async def renew(self, lease: LeaseId) -> None:
        """Raises SessionLost if `lease` has run out, StoreUnavailable if unanswered."""

        async def ask(channel: Any) -> Any:
            try:
                async with asyncio.timeout(self._timeout_s), self._turn:
                    return await self._ask(channel, lease)
            except TimeoutError as exc:
                raise StoreUnavailable(f"no renewal was answered in {self._timeout_s:g} s") from exc

        reply = await self._channels.admitted(ask)
        if reply is grpc.aio.EOF:
            raise StoreUnavailable("etcd ended the keep-alive stream")
        if reply.TTL <= 0:
            raise SessionLost(f"lease {lease:x} has run out")

    def close(self) -> None:
        """Idempotent."""
        if self._call is not None:
            self._call.cancel()
        self._channel = self._call = None

    async def _ask(self, channel: Any, lease: LeaseId) -> Any:
        if channel is not self._channel or self._call.done():
            self.close()
            self._call = rpc.LeaseStub(channel).LeaseKeepAlive(metadata=self._channels.metadata())
            self._channel = channel
        call, answered = self._call, False
        try:
            await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
            reply = await call.read()
            answered = reply is not grpc.aio.EOF
            return reply
        finally:
            if not answered:
                call.cancel()
