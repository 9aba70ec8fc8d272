"""Connections to etcd: one endpoint of several, TLS, a token for our password, and what a failed
call means. With etcd.py and etcd_leases.py the only importer of an etcd client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
from etcd3 import etcdrpc as rpc
from grpc import StatusCode

from dynamo_elastic.coordinator.etcd_access import Credentials, EtcdAccess
from dynamo_elastic.errors import (
    ConfigError,
    OutcomeUnknown,
    SessionLost,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

# With these codes etcd (or our own channel) may have passed the request on before it failed.
MAYBE_APPLIED = frozenset(
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

# All of these are found out before a request is applied.
_LAPSED = ("invalid auth token", "revision of auth store is old")
_AUTH_REMEDIES = {
    "authentication failed": "check etcd.user and etcd.password_file",
    "user name is empty": "set etcd.user and etcd.password_file, or a client certificate whose "
    "common name is a user's",
    "authentication is not enabled": "enable it (etcdctl auth enable), or remove etcd.user",
    "permission denied": "grant its role what docs/security.md lists",
}

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


class EtcdChannels:
    """A channel for each endpoint, one of them in use. Use and close them in one event loop.

    One endpoint is used until it can't be reached; then the next. A token that etcd gave us for
    our password is renewed when it has lapsed; certificates are read again when a connection fails.
    Raises ConfigError for a URL that is not http://host:port, or https:// with a CA, and for a file
    that can't be read; later a file that has become bad is StoreRefused: we may try again.
    """

    def __init__(self, endpoints: Sequence[str], access: EtcdAccess, *, timeout_s: float) -> None:
        self._access = access
        scheme = "https" if access.ca_file else "http"
        self._targets = tuple(_target(url, scheme) for url in endpoints)
        self._timeout_s = timeout_s
        self._credentials = access.read()
        self._channels: list[Any] = []
        self._current = 0
        self._proven: set[int] = set()  # channels whose certificates were found to be right
        self._token = ""

    async def close(self) -> None:
        """Idempotent."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()

    async def admitted(self, act: Callable[[Any], Awaitable[T]], *, write: bool = False) -> T:
        """`act` on a connected channel, with a token if we have a password; once more with a new
        one if etcd does not know it any more. `write`: it could change something."""
        try:
            return await self._attempt(act, write)
        except TokenLapsed:
            self._token = ""
            return await self._attempt(act, write)

    async def _attempt(self, act: Callable[[Any], Awaitable[T]], write: bool) -> T:
        channel = await self.channel()
        try:
            if self._access.user and not self._token:
                self._token = await self._authenticate(channel)
            with mapped(write=write):
                return await act(channel)
        except TokenLapsed:
            raise
        except StoreError:
            self._proven.discard(self._current)
            raise

    async def _authenticate(self, channel: Any) -> str:
        """A token for our user. Raises StoreRefused."""
        credentials = self._read()
        request = rpc.AuthenticateRequest(name=credentials.user, password=credentials.password)
        with mapped():
            reply = await rpc.AuthStub(channel).Authenticate(request, timeout=self._timeout_s)
        return str(reply.token)

    def metadata(self) -> Metadata:
        return (("token", self._token),) if self._token else ()

    async def channel(self) -> Any:
        """A connected channel, the one in use first. Raises StoreUnavailable if there is none.

        A request is only ever sent on a channel that is connected: so a store that is down is told
        from a reply that was lost by where the call failed, not by the text of its error.
        """
        if not self._channels:
            self._open_channels(self._read())
        share_s = self._timeout_s / len(self._channels)
        refusals = []
        for _ in self._targets:
            try:
                if await self._usable(self._current, share_s):
                    return self._channels[self._current]
            except StoreRefused as exc:
                refusals.append(exc)
            self._current = (self._current + 1) % len(self._targets)
        if refusals:
            raise refusals[0]
        raise StoreUnavailable(f"etcd can't be reached at {', '.join(self._targets)}")

    async def _usable(self, number: int, timeout_s: float) -> bool:
        """True once that channel is connected. Raises StoreRefused."""
        if self._access.ca_file is not None and number not in self._proven:
            host, _, port = self._targets[number].rpartition(":")
            try:
                await self._access.prove(host, int(port), timeout_s=timeout_s)
            except StoreRefused:
                raise
            except StoreUnavailable:
                return False
            await self._renew_certificates()
            self._proven.add(number)
        return await _connected(self._channels[number], timeout_s)

    async def _renew_certificates(self) -> None:
        """A channel keeps the certificate that it was made with: make all of them anew if there is
        another one now."""
        now = self._read()
        if now != self._credentials:
            old = self._channels
            self._open_channels(now)
            for channel in old:
                await channel.close()

    def _read(self) -> Credentials:
        try:
            return self._access.read()
        except ConfigError as exc:
            raise StoreRefused(str(exc)) from exc

    def _open_channels(self, credentials: Credentials) -> None:
        self._credentials = credentials
        if self._access.ca_file is None:
            make = grpc.aio.insecure_channel
            self._channels = [make(t, options=_CHANNEL_OPTIONS) for t in self._targets]
            return
        tls = grpc.ssl_channel_credentials(
            credentials.ca, credentials.key or None, credentials.cert or None
        )
        self._channels = [
            grpc.aio.secure_channel(t, tls, options=_CHANNEL_OPTIONS) for t in self._targets
        ]


class TokenLapsed(StoreRefused):
    """etcd does not know our token any more."""


def refusal_of(details: str) -> StoreRefused | None:
    """The error for a request that etcd has refused for who we are; None if that is not why."""
    for said, remedy in _AUTH_REMEDIES.items():
        if said in details:
            return StoreRefused(f"etcd: {details.removeprefix('etcdserver: ')}; {remedy}")
    return None


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
def mapped(*, write: bool = False) -> Iterator[None]:
    """Map every failure of one gRPC call to our errors; `write` if it could change something."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        code, details = exc.code(), exc.details()
        message = f"etcd: {code.name}: {details}"
        if code is StatusCode.NOT_FOUND:
            raise SessionLost(f"etcd: {details}") from exc
        if any(text in (details or "") for text in _LAPSED):
            raise TokenLapsed(message) from exc
        refusal = refusal_of(details or "")
        if refusal is not None:
            raise refusal from exc
        if code is StatusCode.INVALID_ARGUMENT:
            raise ValueError(message) from exc
        if write and code in MAYBE_APPLIED:
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


def _target(url: str, scheme: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != scheme or not parts.hostname or not parts.port:
        raise ConfigError([f"etcd.endpoints: {url!r} is not {scheme}://host:port; correct it"])
    return f"{parts.hostname}:{parts.port}"
