"""A plugin of Dynamo's planner: its decisions are widths that can be had.

It runs in the planner's process, in the RECONCILE stage: there a proposal may be raised as well as
lowered. Dynamo's own floor and budget come after all plugins, so our watcher makes decisions legal
once more. `serve` puts it into the planner's settings (`planner.constrain`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo.common.forward_pass_metrics import decode as decode_metrics
from dynamo.planner.plugins.types import (
    AcceptResult,
    ComponentTarget,
    OverrideResult,
    OverrideType,
    ReconcileStageRequest,
    ReconcileStageResponse,
)

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.etcd_access import EtcdAccess
from dynamo_elastic.coordinator.records import CapacityRecord, Keys, decode
from dynamo_elastic.dynamo.widths import nearest_width

log = logging.getLogger(__name__)

_COMPONENT = "decode"
"""What a planner in mode `agg` calls its workers."""
_TIMEOUT_S = 1.0


class LegalWidths:
    """Constrains the planner. Never raises into it: whatever is wrong, the decision passes as it
    was, and the log says why."""

    def __init__(
        self,
        *,
        endpoints: Sequence[str],
        deployment: str,
        namespace: str,
        full_kv_share: float,
        access: Mapping[str, Any] | None = None,
    ) -> None:
        """`full_kv_share` is the share of a rank's KV cache at which the planner goes up; `access`
        is of EtcdAccess.to_json()."""
        self._endpoints = tuple(endpoints)
        self._access = EtcdAccess.from_json(access or {})
        self._keys = Keys(deployment)
        self._cards = f"v1/mdc/{namespace}/"
        self._full_kv_share = full_kv_share
        self._store: EtcdStore | None = None
        self._said = ""

    async def Reconcile(self, request: ReconcileStageRequest) -> ReconcileStageResponse:
        """The planner's call, once a tick."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._reconcile(request)
        except Exception as exc:  # noqa: BLE001
            return self._pass(f"decision not looked at: {type(exc).__name__}: {exc}")

    async def _reconcile(self, request: ReconcileStageRequest) -> ReconcileStageResponse:
        current, wanted = _ready(request), _proposed(request)
        if current is None or wanted is None or wanted == current:
            return self._pass("")
        store = self._store = self._store or EtcdStore(self._endpoints, self._access)
        stored = await store.get(self._keys.capacity)
        if stored is None:
            return self._pass(f"decision not looked at: nothing under {self._keys.capacity}")
        capacity = decode(CapacityRecord, stored.value)
        fits = self._fits(request, current, await self._kv_tokens(store))
        width, why = nearest_width(current, wanted, capacity, fits)
        if width == wanted:
            return self._pass("")
        self._say(why)
        target = ComponentTarget(
            sub_component_type=_COMPONENT, replicas=width, type=OverrideType.SET
        )
        return ReconcileStageResponse(override=OverrideResult(targets=[target], reason=why))

    def _fits(
        self, request: ReconcileStageRequest, current: int, kv_tokens: int
    ) -> Callable[[int], bool]:
        """Whether the load of now leaves `n` ranks below the planner's own threshold; the test that
        Dynamo makes before it goes down one rank. False if the load is not known."""
        busiest = max(_loads(request), default=None)
        full = self._full_kv_share * kv_tokens

        def fits(ranks: int) -> bool:
            return busiest is not None and full > 0 and busiest * current / ranks < full

        return fits

    async def _kv_tokens(self, store: EtcdStore) -> int:
        """Tokens that the KV cache of a rank holds, from a card; 0 if there is none."""
        for stored in await store.get_prefix(self._cards):
            card = json.loads(stored.value)["card_json"]
            blocks = card["runtime_config"].get("total_kv_blocks") or 0
            return int(blocks) * int(card.get("kv_cache_block_size") or 0)
        return 0

    def _pass(self, why: str) -> ReconcileStageResponse:
        self._say(why)
        return ReconcileStageResponse(accept=AcceptResult())

    def _say(self, why: str) -> None:
        """Once a reason, not once a tick."""
        if why and why != self._said:
            log.warning("dynamo-elastic: %s", why)
        self._said = why


def _ready(request: ReconcileStageRequest) -> int | None:
    observed = request.context and request.context.observations
    workers = observed and observed.workers
    return workers.ready_decode if workers else None


def _proposed(request: ReconcileStageRequest) -> int | None:
    proposal = request.context and request.context.proposal
    targets = proposal.targets if proposal else ()
    return next((t.replicas for t in targets if t.sub_component_type == _COMPONENT), None)


def _loads(request: ReconcileStageRequest) -> list[int]:
    """KV tokens that each rank holds or has queued, as the planner counts them."""
    observed = request.context and request.context.observations
    engines = observed.fpm.decode_engines if observed and observed.fpm else {}
    metrics: list[Any] = [decode_metrics(raw) for raw in engines.values()]
    return [
        m.scheduled_requests.sum_decode_kv_tokens
        + m.queued_requests.sum_decode_kv_tokens
        + m.queued_requests.sum_prefill_tokens
        for m in metrics
        if m is not None
    ]
