"""The agent, as worker shells and the supervisor call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dynamo_elastic.agent.base import SlotStatus, StartedEngine, Tier
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

_CALL_TIMEOUT_S = 30.0
_REPLY_MARGIN_S = 15.0
"""Over the time that the agent gets itself: undoing a failed start takes time too."""

_STARTED = TypeAdapter(StartedEngine)
_SLOTS = TypeAdapter(tuple[SlotStatus, ...])


class AgentClient:
    """agent.base.Agent over the agent's socket. Close it."""

    def __init__(self, socket_path: Path) -> None:
        self._rpc = RpcClient(socket_path)

    async def start_engine(
        self,
        slot: int,
        worker_id: WorkerId,
        operation_id: OperationId,
        epoch: Epoch,
        *,
        tiers: tuple[Tier, ...] = tuple(Tier),
        founds: bool = False,
        timeout_s: float,
    ) -> StartedEngine:
        params = {
            "slot": slot,
            "worker_id": worker_id,
            "operation_id": operation_id,
            "epoch": epoch,
            "tiers": [tier.value for tier in tiers],
            "timeout_s": timeout_s,
        }
        if founds:  # an agent of the release before knows no founders
            params["founds"] = True
        reply = await self._rpc.call("start_engine", params, timeout_s=timeout_s + _REPLY_MARGIN_S)
        return _STARTED.validate_python(reply)

    async def stop_engine(self, slot: int, incarnation: Incarnation) -> None:
        params = {"slot": slot, "incarnation": incarnation}
        await self._rpc.call("stop_engine", params, timeout_s=_CALL_TIMEOUT_S)

    async def park_engine(self, slot: int, incarnation: Incarnation, *, timeout_s: float) -> str:
        params = {"slot": slot, "incarnation": incarnation, "timeout_s": timeout_s}
        reply = await self._rpc.call("park_engine", params, timeout_s=timeout_s + _REPLY_MARGIN_S)
        return str(reply)

    async def slots(self) -> tuple[SlotStatus, ...]:
        return _SLOTS.validate_python(await self._rpc.call("slots", {}, timeout_s=_CALL_TIMEOUT_S))

    async def status(self) -> dict[str, Any]:
        """What this host can't do, and why: {'skipped': [...], 'no_image': {slot: reason},
        'quarantine': {image: reason}, 'draining': reason or '', 'tidied': [...], 'gpus': {slot:
        uuid}}."""
        reply: dict[str, Any] = await self._rpc.call("status", {}, timeout_s=_CALL_TIMEOUT_S)
        return reply

    async def drain(self, reason: str) -> dict[str, Any]:
        """No engine is started from now on; those that serve go on, images stay, parked engines
        end. Returns {'draining': reason, 'serving': [slot, ...], 'evicted': [slot, ...]}.
        Idempotent."""
        params = {"reason": reason}
        reply: dict[str, Any] = await self._rpc.call("drain", params, timeout_s=_CALL_TIMEOUT_S)
        return reply

    async def evict(self, slot: int | None) -> tuple[int, ...]:
        """End the engine parked in `slot`, or all for None; the slots that had one. Idempotent."""
        reply = await self._rpc.call("evict", {"slot": slot}, timeout_s=_CALL_TIMEOUT_S)
        return tuple(reply)

    async def undrain(self) -> None:
        """Undo drain(). Idempotent."""
        await self._rpc.call("undrain", {}, timeout_s=_CALL_TIMEOUT_S)

    async def stop_all(self) -> None:
        """Every engine and their namespace are gone; the agent ends after its answer."""
        await self._rpc.call("stop_all", {}, timeout_s=_CALL_TIMEOUT_S)

    async def close(self) -> None:
        await self._rpc.close()
