"""Runs beside the resizes: work on images by the command line, with a fault in it, while a
deployment serves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dynamo_elastic.failpoint_table import FAILPOINTS, Stage
from dynamo_elastic.testing.chaos.scenario import ACTS, AtFailpoint, at_failpoint

CLI = "cli"
"""The scope of the command line's failpoints: the agent passes some of the same name."""


class Work(StrEnum):
    """What is done to an image."""

    TAKE = "take an image"
    EXPORT = "export an image"
    IMPORT = "import an image"
    REMOVE = "remove an image"
    TIDY = "remove what a dead process left"


@dataclass(frozen=True, slots=True)
class ImageScenario:
    """One run."""

    number: int
    work: Work
    fault: AtFailpoint

    @property
    def cell(self) -> tuple[str, str]:
        """Of the matrix: where, and what is done there."""
        return self.fault.place, self.fault.act

    def __str__(self) -> str:
        return f"{self.work}: {self.fault.act} of the command line at {self.fault.place}"


def _passed(work: Work) -> tuple[str, ...]:
    """Failpoints that only a command line passes in `work`."""
    wanted = {
        Work.TAKE: ("take.", "catalog.publish."),
        Work.EXPORT: ("catalog.export.",),
        Work.IMPORT: ("catalog.import.", "catalog.publish."),
        Work.REMOVE: ("catalog.remove.",),
        Work.TIDY: ("catalog.partials.",),
    }
    stages = (Stage.TAKE, Stage.STORE, Stage.REMOVE)
    names = [f.name for f in FAILPOINTS if f.stage in stages]
    return tuple(n for n in names if n.startswith(wanted[work]))


def image_cells() -> tuple[tuple[Work, AtFailpoint], ...]:
    """Every failpoint with each act, in each work that passes it."""
    return tuple(
        (work, at_failpoint(place, CLI, act))
        for work in Work
        for place in _passed(work)
        for act in ACTS
    )
