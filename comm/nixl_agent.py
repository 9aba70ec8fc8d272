"""NIXL behind TransferAgent: the only importer of nixl. Every NIXL error becomes ours here.

It uses NIXL's bindings, not its Python wrapper: the wrapper's progress thread spins, and takes one
core of an engine that transfers nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

# NIXL and UCX read these when they are loaded, so they are set before; what the user set wins.
# Their logs go to stdout. Hooks on mmap() serve registration caches, which we have no use for as
# all memory outlives its agent, and cost 0.4 s. Shared-memory transports outlive a kill -9.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
os.environ.setdefault("UCX_TLS", "cma,tcp,cuda_copy,cuda_ipc")

from nixl_cu13 import _bindings as nixl

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

_SEGMENTS = {MemoryKind.DRAM: nixl.DRAM_SEG, MemoryKind.VRAM: nixl.VRAM_SEG}
_PROGRESS_WAIT_US = 5000
"""How long the progress thread sleeps if no socket wakes it."""
_LOCAL = "none"


@contextmanager
def nixl_errors(act: str, remote: str) -> Iterator[None]:
    """Turn NIXL's errors into TransferError about `remote`."""
    try:
        yield
    except tuple(ERRORS) as exc:
        raise TransferError(f"{act} failed: {ERRORS[type(exc)]}", remote=remote) from exc


class NixlTransfer:
    """A Transfer (see comm.base); it is in its agent's `open_transfers` until released."""

    def __init__(
        self, agent: nixl.nixlAgent, handle: int, remote: str, open_transfers: set[NixlTransfer]
    ) -> None:
        self._agent: nixl.nixlAgent | None = agent
        self._handle = handle
        self._remote = remote
        self._done = False
        self._open_transfers = open_transfers
        open_transfers.add(self)

    def post(self) -> None:
        """Start it. Raises TransferError."""
        with nixl_errors("a write", self._remote):
            self._done = self._live().postXferReq(self._handle, b"") == nixl.NIXL_SUCCESS

    def poll(self) -> TransferState:
        if not self._done:
            with nixl_errors("a write", self._remote):
                self._done = self._live().getXferStatus(self._handle) == nixl.NIXL_SUCCESS
        return TransferState.DONE if self._done else TransferState.RUNNING

    def release(self) -> None:
        if self._agent is None:
            return
        # What cannot be cancelled now is freed with the agent.
        with suppress(*ERRORS):
            self._agent.releaseXferReq(self._handle)
        self._agent = None
        self._open_transfers.discard(self)

    def _live(self) -> nixl.nixlAgent:
        if self._agent is None:
            raise TransferError("the write was released", remote=self._remote)
        return self._agent


class NixlAgent:
    """A TransferAgent (see comm.base) on NIXL's UCX backend.

    A peer that dies is found out within about half a second, one that is stopped never: every wait
    needs a deadline of its own. Raises ResourceMissing if UCX does not start.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._remotes: dict[bytes, str] = {}
        self._open_transfers: set[NixlTransfer] = set()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_WAIT_US
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        try:
            self._nixl: nixl.nixlAgent | None = nixl.nixlAgent(name, config)
            # Without its handling of peer errors, a transfer to a dead peer never ends.
            self._ucx = self._nixl.createBackend("UCX", {"ucx_error_handling_mode": "peer"})
        except tuple(ERRORS) as exc:
            raise ResourceMissing(
                f"NIXL cannot start UCX ({ERRORS[type(exc)]})",
                remedy=f"let UCX_TLS, which is {os.environ['UCX_TLS']}, contain tcp or rc",
            ) from exc

    @property
    def name(self) -> str:
        return self._name

    def register(self, span: Span, kind: MemoryKind = MemoryKind.DRAM) -> None:
        entry = (span.address, span.size_bytes, span.device, "")
        with nixl_errors("registering memory", _LOCAL):
            self._live().registerMem(nixl.nixlRegDList(_SEGMENTS[kind], [entry]), [self._ucx])

    def metadata(self) -> bytes:
        with nixl_errors("reading own metadata", _LOCAL):
            return bytes(self._live().getLocalMD())

    def add_remote(self, metadata: bytes) -> str:
        agent = self._live()
        known = self._remotes.get(metadata)
        if known is not None and agent.checkRemoteMD(known, nixl.nixlXferDList(nixl.DRAM_SEG, [])):
            return known
        with nixl_errors("loading a remote agent", known or "unknown"):
            name: str = agent.loadRemoteMD(metadata).decode()
            agent.makeConnection(name, [self._ucx])
        self._remotes[metadata] = name
        return name

    def remove_remote(self, name: str) -> None:
        self._remotes = {m: n for m, n in self._remotes.items() if n != name}
        with nixl_errors("removing a remote agent", name), suppress(nixl.nixlNotFoundError):
            self._live().invalidateRemoteMD(name)

    def write(
        self, remote: str, local: Sequence[Span], target: Sequence[Span], kind: MemoryKind
    ) -> NixlTransfer:
        """As in TransferAgent. To a process of this host (CMA) it copies before it returns; other
        threads run meanwhile."""
        agent = self._live()
        ours, theirs = _descriptors(local, kind), _descriptors(target, kind)
        with nixl_errors("preparing a write", remote):
            handle = agent.createXferReq(nixl.NIXL_WRITE, ours, theirs, remote, b"", [self._ucx])
        transfer = NixlTransfer(agent, handle, remote, self._open_transfers)
        try:
            transfer.post()
        except TransferError:
            transfer.release()
            raise
        return transfer

    def close(self) -> None:
        for transfer in list(self._open_transfers):
            transfer.release()
        # No transfer refers to it any more, so this destroys it here and now.
        self._nixl = None

    def _live(self) -> nixl.nixlAgent:
        if self._nixl is None:
            raise TransferError(f"agent {self._name} is closed", remote=_LOCAL)
        return self._nixl


def _descriptors(spans: Sequence[Span], kind: MemoryKind) -> nixl.nixlXferDList:
    return nixl.nixlXferDList(_SEGMENTS[kind], [(s.address, s.size_bytes, s.device) for s in spans])
