"""This rank's weights and how they travel: its NIXL agent, the peers it knows, and digests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dynamo_elastic.comm.base import MemoryKind, Span, TransferAgent
from dynamo_elastic.comm.transfer_plan import Chunk
from dynamo_elastic.comm.weights import Destination, Limits, push
from dynamo_elastic.engine.reference.layout import DENSE
from dynamo_elastic.engine.reference.model import Weights
from dynamo_elastic.errors import EngineError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.types import Region, WorkerId

CHUNK_BYTES = {MemoryKind.DRAM: 1 << 20, MemoryKind.VRAM: 256 << 20}

_LIMITS = {
    MemoryKind.DRAM: Limits(window_bytes=16 << 20, transfer_timeout_s=5.0, timeout_s=30.0),
    # Below the floor a push inside a host has left NVLink.
    MemoryKind.VRAM: Limits(
        window_bytes=2 << 30, transfer_timeout_s=5.0, timeout_s=30.0, floor_gbps=50.0
    ),
}


class Transfers:
    """`agent` is this incarnation's own; its life is that of the process. One thread at a time may
    use it."""

    def __init__(self, weights: Weights, agent: TransferAgent) -> None:
        self.weights = weights
        self._agent = agent
        self._peers: dict[WorkerId, Destination] = {}
        self._span = Span(weights.arena.address, weights.arena.size_bytes)
        agent.register(self._span, weights.store.kind)

    @property
    def chunk_bytes(self) -> int:
        """Into which pieces a plan cuts what is to be written."""
        return CHUNK_BYTES[self.weights.store.kind]

    def endpoint(self) -> dict[str, Any]:
        """What peers need to write into our arena."""
        return {
            "agent": self._agent.metadata().hex(),
            "address": self._span.address,
            "size_bytes": self._span.size_bytes,
        }

    def add(self, worker_id: WorkerId, endpoint: dict[str, Any]) -> None:
        """Know the arena of `worker_id`; an older one of it is forgotten. Raises TransferError, or
        EngineError if its arena is laid out in another way than ours."""
        if endpoint["size_bytes"] != self._span.size_bytes:
            raise EngineError(
                f"{worker_id} has {endpoint['size_bytes']} bytes of weights, this rank "
                f"{self._span.size_bytes}: their settings or models differ"
            )
        failpoint("transfer.before_peer")
        name = self._agent.add_remote(bytes.fromhex(endpoint["agent"]))
        before = self._peers.get(worker_id)
        if before is not None and before.agent_name != name:
            self._agent.remove_remote(before.agent_name)
        arena = Span(endpoint["address"], endpoint["size_bytes"])
        self._peers[worker_id] = Destination(name, arena)

    def keep_only(self, workers: Iterable[WorkerId]) -> None:
        """Forget every peer that is not among `workers`."""
        for worker_id in self._peers.keys() - set(workers):
            self._agent.remove_remote(self._peers.pop(worker_id).agent_name)

    def close(self) -> None:
        """Forget all peers and end the agent: nobody can write here any more."""
        self.keep_only(())
        self._agent.close()

    def write(self, chunks: Sequence[Chunk]) -> int:
        """Write `chunks` into their targets' arenas; the number of bytes.

        Raises EngineError if a target is unknown, TransferError if a transfer failed: what the
        targets hold then is unknown, and bytes may still land until the target ends.
        """
        unknown = {c.target for c in chunks} - self._peers.keys()
        if unknown:
            raise EngineError(f"not connected to {sorted(unknown)}")
        kind = self.weights.store.kind
        return push(self._agent, chunks, self._span, self._peers, kind, _LIMITS[kind])

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Digests of own regions. Raises EngineError for a name that there is not."""
        try:
            return self.weights.digests(names)
        except KeyError as exc:
            raise EngineError(f"there is no region {exc}") from exc

    def dense_regions(self) -> list[Region]:
        return [r for r in self.weights.arena.regions if r.name.startswith(DENSE)]

    def require(self, digests: dict[str, str]) -> None:
        """Return if own regions have these digests. Raises EngineError naming those that differ."""
        actual = self.digests(digests)
        wrong = sorted(name for name, value in digests.items() if actual[name] != value)
        if wrong:
            shown = ", ".join(wrong[:3])
            raise EngineError(f"{len(wrong)} regions do not hold what was sent: {shown}")
