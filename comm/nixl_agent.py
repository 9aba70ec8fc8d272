"""NIXL behind TransferAgent: the only importer of nixl. Every NIXL error becomes ours here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

# NIXL and UCX read these when they are loaded, so they are set before; what the user set wins.
# Their logs go to stdout. Hooks on mmap() serve registration caches, which we have no use for as
# all memory outlives its agent, and cost 0.4 s. Shared-memory transports outlive a kill -9.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
os.environ.setdefault("UCX_TLS", "cma,tcp,cuda_copy,cuda_ipc")

from nixl_cu13 import _bindings as nixl
from nixl_cu13 import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixl_xfer_handle

from dynamo_elastic.comm.base import MemoryKind, Span, TransferState
from dynamo_elastic.errors import ResourceMissing, TransferError

ERRORS: Mapping[type[Exception], str] = {
    nixl.nixlBackendError: "the transport failed",
    nixl.nixlCancelledError: "the transfer was cancelled",
    nixl.nixlInvalidParamError: "an argument is invalid",
    nixl.nixlMismatchError: "local and remote memory do not match",
    nixl.nixlNoTelemetryError: "there is no telemetry",
    nixl.nixlNotAllowedError: "that is not allowed now",
    nixl.nixlNotFoundError: "the remote or its memory is unknown",
    nixl.nixlNotPostedError: "the transfer was never posted",
    nixl.nixlNotSupportedError: "the transport cannot do that",
    nixl.nixlRemoteDisconnectError: "the remote went away",
    nixl.nixlRepostActiveError: "the transfer is already under way",
    nixl.nixlUnknownError: "unknown cause",
}
"""Every error of NIXL, in words."""

_LOCAL = "none"


@contextmanager
def _nixl_errors(act: str, remote: str) -> Iterator[None]:
    """Turn NIXL's errors into TransferError about `remote`."""
    try:
        yield
    except tuple(ERRORS) as exc:
        raise TransferError(f"{act} failed: {ERRORS[type(exc)]}", remote=remote) from exc


class NixlTransfer:
    """A Transfer (see comm.base) that is listed in its agent's `open_transfers` until released."""

    def __init__(
        self,
        agent: nixl_agent,
        handle: nixl_xfer_handle,
        remote: str,
        open_transfers: set[NixlTransfer],
    ) -> None:
        self._live: tuple[nixl_agent, nixl_xfer_handle] | None = (agent, handle)
        self._remote = remote
        self._done = False
        self._open_transfers = open_transfers
        open_transfers.add(self)

    def post(self) -> None:
        """Start it. Raises TransferError."""
        self._ask(nixl_agent.transfer)

    def poll(self) -> TransferState:
        if not self._done:
            self._ask(nixl_agent.check_xfer_state)
        return TransferState.DONE if self._done else TransferState.RUNNING

    def _ask(self, question: Callable[[nixl_agent, nixl_xfer_handle], str]) -> None:
        if self._live is None:
            raise TransferError("the transfer was released", remote=self._remote)
        with _nixl_errors("a write", self._remote):
            answer = question(*self._live)
        if answer == "ERR":
            raise TransferError("a write failed", remote=self._remote)
        self._done = answer == "DONE"

    def release(self) -> None:
        if self._live is None:
            return
        _, handle = self._live
        self._live = None
        self._open_transfers.discard(self)
        # What cannot be cancelled now is freed with the agent.
        with suppress(*ERRORS):
            handle.release()


class NixlAgent:
    """A TransferAgent (see comm.base) on NIXL's UCX backend.

    Peers find out within about half a second that one of them died, but never that one is
    stopped: every wait needs a deadline of its own. Raises ResourceMissing if UCX does not start.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._remotes: dict[bytes, str] = {}
        self._open: set[NixlTransfer] = set()
        config = nixl_agent_config(
            enable_prog_thread=True,
            backends=[],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        try:
            self._nixl: nixl_agent | None = nixl_agent(name, config)
            # In this mode alone a transfer to a dead peer ends.
            self._nixl.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        except tuple(ERRORS) as exc:
            raise ResourceMissing(
                f"NIXL cannot start UCX ({ERRORS[type(exc)]})",
                remedy=f"UCX_TLS is {os.environ['UCX_TLS']}; it must allow tcp, or rc",
            ) from exc

    @property
    def name(self) -> str:
        return self._name

    def register(self, span: Span, kind: MemoryKind = MemoryKind.DRAM) -> None:
        with _nixl_errors("registering memory", _LOCAL):
            self._agent().register_memory(_entries([span], named=True), kind.value)

    def metadata(self) -> bytes:
        with _nixl_errors("reading own metadata", _LOCAL):
            return bytes(self._agent().get_agent_metadata())

    def add_remote(self, metadata: bytes) -> str:
        agent = self._agent()
        known = self._remotes.get(metadata)
        if known is not None and agent.check_remote_metadata(known):
            return known
        with _nixl_errors("loading a remote agent", known or "unknown"):
            name = agent.add_remote_agent(metadata)
        decoded = name.decode() if isinstance(name, bytes) else str(name)
        with _nixl_errors("connecting", decoded):
            agent.make_connection(decoded)
        self._remotes[metadata] = decoded
        return decoded

    def remove_remote(self, name: str) -> None:
        self._remotes = {m: n for m, n in self._remotes.items() if n != name}
        with _nixl_errors("removing a remote agent", name), suppress(nixl.nixlNotFoundError):
            self._agent().remove_remote_agent(name)

    def write(
        self, remote: str, local: Sequence[Span], target: Sequence[Span], kind: MemoryKind
    ) -> NixlTransfer:
        """As in TransferAgent. Over CMA (another process of this host) it copies before it
        returns, without holding the GIL."""
        agent = self._agent()
        with _nixl_errors("preparing a write", remote):
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(_entries(local), kind.value),
                agent.get_xfer_descs(_entries(target), kind.value),
                remote,
            )
        transfer = NixlTransfer(agent, handle, remote, self._open)
        try:
            transfer.post()
        except TransferError:
            transfer.release()
            raise
        return transfer

    def close(self) -> None:
        for transfer in list(self._open):
            transfer.release()
        # Transfers hold no reference any more, so this destroys the agent here and now.
        self._nixl = None

    def _agent(self) -> nixl_agent:
        if self._nixl is None:
            raise TransferError(f"agent {self._name} is closed", remote=_LOCAL)
        return self._nixl


def _entries(spans: Sequence[Span], *, named: bool = False) -> list[tuple[int | str, ...]]:
    """Spans the way NIXL takes them; descriptors for registration have a name, unused here."""
    name = ("",) if named else ()
    return [(s.address, s.size_bytes, s.device, *name) for s in spans]
