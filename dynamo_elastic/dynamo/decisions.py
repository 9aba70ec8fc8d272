"""What Dynamo's planner writes into etcd, and how it is read. Pure.

v1/{namespace}/planner/
  num_decode_workers   replicas that the planner wants (lease of the planner)
  decision_id          counts up, and may start at 0 again with a new planner (same lease)
  scaled_decision_id   our acknowledgement; without one the planner decides nothing more
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_elastic.coordinator.store import Changed, Versioned

log = logging.getLogger(__name__)

Stored = Mapping[str, Versioned | Changed]


@dataclass(frozen=True, slots=True)
class PlannerKeys:
    """Where Dynamo's planner and its environment meet, in etcd."""

    namespace: str

    @property
    def prefix(self) -> str:
        return f"v1/{self.namespace}/planner/"

    @property
    def instances(self) -> str:
        """Every planner that runs has a key under this, on its lease."""
        return f"v1/instances/{self.namespace}/Planner/"

    @property
    def ranks(self) -> str:
        return f"{self.prefix}num_decode_workers"

    @property
    def decision(self) -> str:
        return f"{self.prefix}decision_id"

    @property
    def acknowledged(self) -> str:
        return f"{self.prefix}scaled_decision_id"


@dataclass(frozen=True, slots=True)
class Decision:
    """The planner wants `ranks` ranks. Named by its id and by a revision of etcd: ids repeat."""

    decision_id: str
    revision: int
    ranks: int

    @property
    def request_id(self) -> str:
        return f"planner-{self.decision_id}-{self.revision}"


def pending_decision(stored: Stored, keys: PlannerKeys) -> Decision | None:
    """The decision in `stored` that was not acknowledged after it was written.

    Ids are not compared: a new planner's may be below an old acknowledgement. Whichever of id and
    count was written later makes the decision, so it does not matter if they come one by one.
    """
    named, ranks, ack = (stored.get(k) for k in (keys.decision, keys.ranks, keys.acknowledged))
    if named is None or ranks is None or named.value is None or ranks.value is None:
        return None
    revision = max(named.mod_revision, ranks.mod_revision)
    if ack is not None and ack.value is not None and ack.mod_revision > revision:
        return None
    try:
        return Decision(named.value.decode(), revision, int(ranks.value))
    except ValueError:
        log.error("planner decision %r wants %r ranks: ignored", named.value, ranks.value)
        return None
