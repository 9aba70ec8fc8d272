"""A TransferAgent without NIXL: copies memory inside one process, and fails as a test says."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_elastic.comm.base import MemoryKind, Span, TransferState
from dynamo_elastic.errors import TransferError

_LOCAL = "none"


@dataclass
class FakeFabric:
    """What connects the FakeTransferAgents of one test, and what goes wrong between them."""

    agents: dict[str, FakeTransferAgent] = field(default_factory=dict)
    dies_after_bytes: dict[str, int] = field(default_factory=dict)
    """Remotes that die once that many bytes have been written to them."""
    stopped: set[str] = field(default_factory=set)
    """Remotes to which no write ever completes."""


class FakeTransfer:
    """A write that lands, in full, when it is first polled."""

    def __init__(self, agent: FakeTransferAgent, remote: str, copies: list[tuple[Span, Span]]):
        self.size_bytes = sum(local.size_bytes for local, _ in copies)
        self._agent = agent
        self._remote = remote
        self._copies = copies
        self._released = False

    def poll(self) -> TransferState:
        if self._released:
            raise TransferError("the write was released", remote=self._remote)
        if self._remote in self._agent.fabric.stopped:
            return TransferState.RUNNING
        while self._copies:
            local, target = self._copies.pop(0)
            self._agent.copy(self._remote, local, target)
        return TransferState.DONE

    def release(self) -> None:
        self._released = True
        self._agent.open_transfers.discard(self)


class FakeTransferAgent:
    """See comm.base.TransferAgent; both ends are in this process, on one FakeFabric."""

    def __init__(self, name: str, fabric: FakeFabric) -> None:
        self.fabric = fabric
        self.open_transfers: set[FakeTransfer] = set()
        """Written and not released."""
        self.bytes_received = 0
        self._name = name
        self._spans: list[Span] = []
        self._remotes: set[str] = set()
        self._closed = False
        fabric.agents[name] = self

    @property
    def name(self) -> str:
        return self._name

    def register(self, span: Span, kind: MemoryKind = MemoryKind.DRAM) -> None:
        self._check_open()
        self._spans.append(span)

    def metadata(self) -> bytes:
        self._check_open()
        return self._name.encode()

    def add_remote(self, metadata: bytes) -> str:
        self._check_open()
        name = metadata.decode(errors="replace")
        if name not in self.fabric.agents:
            raise TransferError("loading a remote agent failed", remote=name)
        self._remotes.add(name)
        return name

    def remove_remote(self, name: str) -> None:
        self._check_open()
        self._remotes.discard(name)

    def write(
        self, remote: str, local: Sequence[Span], target: Sequence[Span], kind: MemoryKind
    ) -> FakeTransfer:
        self._check_open()
        peer = self.fabric.agents.get(remote)
        if remote not in self._remotes or peer is None:
            raise TransferError("the remote is unknown", remote=remote)
        if [s.size_bytes for s in local] != [s.size_bytes for s in target]:
            raise TransferError("local and remote memory do not match", remote=remote)
        if not all(map(self.holds, local)) or not all(map(peer.holds, target)):
            raise TransferError("memory is not registered", remote=remote)
        transfer = FakeTransfer(self, remote, list(zip(local, target, strict=True)))
        self.open_transfers.add(transfer)
        return transfer

    def close(self) -> None:
        for transfer in list(self.open_transfers):
            transfer.release()
        self._closed = True
        self.fabric.agents.pop(self._name, None)

    def holds(self, span: Span) -> bool:
        """Whether all of `span` is registered."""
        end = span.address + span.size_bytes
        return any(
            s.address <= span.address and end <= s.address + s.size_bytes for s in self._spans
        )

    def copy(self, remote: str, local: Span, target: Span) -> None:
        """Move the bytes; those that the remote still takes, if it is to die."""
        peer = self.fabric.agents.get(remote)
        if peer is None:
            raise TransferError("the remote went away", remote=remote)
        room = self.fabric.dies_after_bytes.get(remote, peer.bytes_received + local.size_bytes)
        count = min(local.size_bytes, max(0, room - peer.bytes_received))
        ctypes.memmove(target.address, local.address, count)
        peer.bytes_received += count
        if count < local.size_bytes:
            raise TransferError("the remote went away", remote=remote)

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"agent {self._name} is closed", remote=_LOCAL)
