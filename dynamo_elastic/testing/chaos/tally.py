"""What runs add up to: sums, and in how many of them each fault happened where. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_elastic.testing.chaos.scenario import ANY_MOMENT

ENOUGH = 3
"""Times that a failpoint is to be hit."""

Verdicts = Sequence[Mapping[str, Any]]
Cells = dict[str, dict[str, int]]
"""Row -> column -> runs."""

_SUMMED = (
    *("runs", "runs_with_fault", "violations", "hangs"),
    *("requests_total", "requests_retried", "requests_lost", "seconds"),
)
_TABLES = ("failpoints", "around", "bad_failpoints", "bad_around")


@dataclass(slots=True)
class Tally:
    """What a number of runs came to. Tallies of different runs can be added."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0.0))
    silence_max_s: float = 0.0
    failpoints: Cells = field(default_factory=dict)
    """Failpoint -> act -> runs in which it happened."""
    around: Cells = field(default_factory=dict)
    """Fault at a moment drawn by lot -> process -> runs in which it happened."""
    bad_failpoints: Cells = field(default_factory=dict)
    """The bad ones of `failpoints`, and those in which the fault did not happen."""
    bad_around: Cells = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)
    """The verdict of every run that was bad."""

    @property
    def hits(self) -> dict[str, int]:
        """How often each failpoint was hit."""
        return {place: sum(acts.values()) for place, acts in self.failpoints.items()}

    def metrics(self) -> dict[str, float]:
        """Of a result."""
        acts = {act for row in self.failpoints.values() for act in row} | self.around.keys()
        return {
            **{name: round(value, 1) for name, value in self.sums.items()},
            "failpoints": len(self.failpoints),
            "failpoints_3_times": sum(n >= ENOUGH for n in self.hits.values()),
            "faults": len(acts),
            "silence_max_s": self.silence_max_s,
        }

    def detail(self) -> dict[str, Any]:
        """Of a result: what tally_of_result() needs besides its metrics."""
        tables = {name: _sorted(getattr(self, name)) for name in _TABLES}
        return {**tables, "bad": self.bad}

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            {name: self.sums[name] + other.sums[name] for name in _SUMMED},
            max(self.silence_max_s, other.silence_max_s),
            _added(self.failpoints, other.failpoints),
            _added(self.around, other.around),
            _added(self.bad_failpoints, other.bad_failpoints),
            _added(self.bad_around, other.bad_around),
            [*self.bad, *other.bad],
        )


def tally(verdicts: Verdicts) -> Tally:
    """Of runs that were played."""
    found = Tally()
    for v in verdicts:
        one = {
            "runs": 1,
            "runs_with_fault": v["fired"],
            "violations": len(v["violations"]),
            "hangs": bool(v["hang"]),
            "requests_total": v["requests"],
            "requests_retried": v["retried"],
            "requests_lost": v["lost"],
            "seconds": v["seconds"],
        }
        found.sums = {name: value + one[name] for name, value in found.sums.items()}
        found.silence_max_s = max(found.silence_max_s, v["silence_s"])
        at_any_moment = v["place"] == ANY_MOMENT
        cell = (v["act"], v["process"]) if at_any_moment else (v["place"], v["act"])
        if v["fired"]:
            _count(found.around if at_any_moment else found.failpoints, *cell)
        if v["violations"] or v["hang"]:
            _count(found.bad_around if at_any_moment else found.bad_failpoints, *cell)
            found.bad.append(dict(v))
    return found


def tally_of_result(result: Mapping[str, Any]) -> Tally:
    """The inverse of metrics() and detail(). Raises KeyError if it is none of ours."""
    metrics, detail = result["metrics"], result["detail"]
    return Tally(
        {name: metrics[name] for name in _SUMMED},
        metrics["silence_max_s"],
        **{name: detail[name] for name in (*_TABLES, "bad")},
    )


def has_enough(result: Mapping[str, Any], place: str, act: str) -> bool:
    """True of a failpoint that a result has hit ENOUGH times, and in this way too; and of faults
    that are at none."""
    acts = tally_of_result(result).failpoints.get(place, {})
    return place == ANY_MOMENT or (sum(acts.values()) >= ENOUGH and act in acts)


def _count(cells: Cells, row: str, column: str) -> None:
    of_row = cells.setdefault(row, {})
    of_row[column] = of_row.get(column, 0) + 1


def _flat(cells: Cells) -> Iterator[tuple[str, str, int]]:
    for row, columns in cells.items():
        for column, runs in columns.items():
            yield row, column, runs


def _added(one: Cells, other: Cells) -> Cells:
    found: Cells = {}
    for row, column, runs in (*_flat(one), *_flat(other)):
        of_row = found.setdefault(row, {})
        of_row[column] = of_row.get(column, 0) + runs
    return found


def _sorted(cells: Cells) -> Cells:
    return {row: dict(sorted(cells[row].items())) for row in sorted(cells)}
