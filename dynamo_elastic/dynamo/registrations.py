"""Registrations of our instances as Dynamo keeps them in etcd, and the end of one whose process
can not end it: Dynamo would show it until its lease runs out."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from dynamo_elastic.coordinator.store import Store, Versioned
from dynamo_elastic.dynamo.base import RUNTIME_DATA_KEY
from dynamo_elastic.types import Epoch, Incarnation, LeaseId

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registration:
    """One instance, and of what it was registered with that which says whose it is."""

    instance_id: int
    deployment: str
    incarnation: Incarnation
    epoch: Epoch


class Registrations:
    """Those of the ranks of one namespace."""

    def __init__(self, store: Store, namespace: str) -> None:
        self._store = store
        self._prefix = f"v1/mdc/{namespace}/backend/generate/"

    async def read(self, deployment: str) -> tuple[Registration, ...]:
        """All of `deployment`. Raises StoreUnavailable."""
        found = map(_registration, await self._store.get_prefix(self._prefix))
        return tuple(r for r in found if r is not None and r.deployment == deployment)

    async def expel(self, registration: Registration) -> None:
        """Not visible any more: an instance is named by the lease that its keys are on. If its
        process lives after all, its runtime ends. Idempotent. Raises StoreError."""
        log.warning("an instance whose process is gone is taken away: %s", registration)
        await self._store.revoke_lease(LeaseId(registration.instance_id))


def _registration(stored: Versioned) -> Registration | None:
    """None if it is not one of ours: other workers may be in the same namespace."""
    try:
        card = json.loads(stored.value)["card_json"]
        data = json.loads(card["runtime_config"]["runtime_data"][RUNTIME_DATA_KEY])
        instance_id = int(stored.key.rpartition("/")[2], 16)
        incarnation, epoch = Incarnation(data["incarnation"]), Epoch(int(data["epoch"]))
        return Registration(instance_id, data["deployment"], incarnation, epoch)
    except (ValueError, KeyError, TypeError):
        return None
