"""From the width that the planner proposes to one that can be had. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_elastic.coordinator.records import CapacityRecord


def nearest_width(
    current: int, wanted: int, capacity: CapacityRecord, fits: Callable[[int], bool]
) -> tuple[int, str]:
    """The width to decide, and why it is not `wanted` ('' if it is).

    The planner goes one rank at a time, so a step that ends between two legal widths must be
    finished or not be made: rounded towards `current` it would be proposed again for ever.

    * Up: finished at the next legal width for which there are GPUs; else as far as they go.
    * Down: stopped at the last legal width before `wanted`; if there is none between, finished at
      the next below, but only if the load of now `fits(n)` there: the planner would otherwise go
      up again at once.

    Never beyond `current` in the other direction.
    """
    if wanted == current or wanted in _options(current, capacity):
        return wanted, ""
    if wanted > current:
        return _up(current, wanted, capacity)
    return _down(current, wanted, capacity, fits)


def _options(current: int, capacity: CapacityRecord) -> tuple[int, ...]:
    """Widths that can be had from here: to go down needs no GPU."""
    return tuple(n for n in capacity.legal if n < current or n <= capacity.attainable)


def _up(current: int, wanted: int, capacity: CapacityRecord) -> tuple[int, str]:
    above = [n for n in _options(current, capacity) if n > current]
    width = min((n for n in above if n >= wanted), default=max(above, default=current))
    short = wanted > capacity.attainable
    why = f"GPUs for {capacity.attainable} ranks" if short else _legal(capacity)
    held = "".join(f"; {w} is in quarantine: {r}" for w, r in capacity.withheld.items())
    return width, f"{wanted} -> {width}: {why}{held if short else ''}"


def _down(
    current: int, wanted: int, capacity: CapacityRecord, fits: Callable[[int], bool]
) -> tuple[int, str]:
    below = [n for n in _options(current, capacity) if n < current]
    before = min((n for n in below if n > wanted), default=None)
    if before is not None:
        return before, f"{wanted} -> {before}: {_legal(capacity)}"
    beyond = max((n for n in below if n < wanted), default=None)
    if beyond is not None and fits(beyond):
        return beyond, f"{wanted} -> {beyond}: {_legal(capacity)}"
    why = "there is none below" if beyond is None else f"the load does not fit {beyond} ranks"
    return current, f"{wanted} -> {current}: {_legal(capacity)}, and {why}"


def _legal(capacity: CapacityRecord) -> str:
    return f"legal widths are {', '.join(str(n) for n in capacity.legal) or 'none'}"
