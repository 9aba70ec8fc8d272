"""What Dynamo's planner thinks: by its own log, and by the keys of its connector."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.dynamo.decisions import PlannerKeys
from dynamo_elastic.errors import StoreError
from dynamo_elastic.testing.dynamo_cards import instances_of

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = re.compile(r"\[summary\] (\w+) \| current: prefill=\d+ decode=(\d+) .*load_reason=(\w+)")
_UNSETTLED = {"scaling_in_progress", "worker_count_mismatch", "no_fpm_data", "insufficient_data"}
"""Reasons of a planner that has not (or not yet) seen what there is."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One tick, as the planner sums it up."""

    action: str
    ranks: int
    reason: str


class PlannerLog:
    """The summaries in a planner's log, from when it was last skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.last: Summary | None = None

    def skip(self) -> None:
        """What it has said so far does not count any more."""
        self._offset = self._path.stat().st_size
        self.last = None

    def stable_at(self, ranks: int) -> bool:
        """True if the planner's newest tick since sees `ranks` ranks and wants no others."""
        with self._path.open(errors="replace") as log:
            log.seek(self._offset)
            said = _COLOURS.sub("", log.read())
        for action, decode, reason in _SUMMARY.findall(said):
            self.last = Summary(action, int(decode), reason)
        last = self.last
        return (
            last is not None
            and last.action == "HOLD"
            and last.ranks == ranks
            and last.reason not in _UNSETTLED
        )


async def connector_is_stable(store: Store, namespace: str, ranks: int) -> bool:
    """True if the planner's connector would say so: `ranks` instances, what was decided last is as
    many and is acknowledged. A planner that has decided nothing since it started has no keys."""
    keys = PlannerKeys(namespace)
    try:
        stored = {v.key: v for v in await store.get_prefix(keys.prefix)}
        instances = await store.get_prefix(instances_of(namespace))
    except StoreError:
        return False
    if len(instances) != ranks:
        return False
    if keys.ranks not in stored or keys.decision not in stored:
        return True
    acknowledged = stored.get(keys.acknowledged)
    return (
        int(stored[keys.ranks].value) == ranks
        and acknowledged is not None
        and int(acknowledged.value) >= int(stored[keys.decision].value)
    )
