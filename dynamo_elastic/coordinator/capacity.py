"""Which widths can be had now: for those who decide how many ranks there shall be. Pure."""

from __future__ import annotations

from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.quarantine import barred_slots, quarantined, released_s
from dynamo_elastic.coordinator.records import CapacityRecord
from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.topology import EngineShape, refusal


def capacity_of(
    status: Status, shape: EngineShape, config: ScaleConfig, now_s: float
) -> CapacityRecord:
    """The legal widths, and for how many ranks there are GPUs: those of ranks that live, and free
    slots. A slot in quarantine is none until it is let out."""
    slots = len(status.members)
    legal = [
        n for n in range(1, config.max_ranks + 1) if refusal(n, shape, config.limits, slots) is None
    ]
    strikes = status.last.strikes if status.last is not None else {}
    suspects = quarantined(strikes, now_s, config.quarantine_s)
    free = status.standby()
    withheld = {w: suspects[w] for w in sorted(barred_slots(suspects)) if w in free}
    living = status.width - len(status.lost_reasons())
    return CapacityRecord(
        width=status.width,
        legal=tuple(legal),
        attainable=living + len(free) - len(withheld),
        withheld=withheld,
        until_s=released_s(strikes, withheld, config.quarantine_s),
    )
