"""What becomes of ranks that leave, and where those who join come from: one tier for each way.

A tier has three calls. `prepare` is told, before an operation, of a rank that will join. `restore`
brings its process: after that, one that has been there before is asked to attach; a cold one joins
by itself. `see_off` is told of ranks that have left. Whoever adds a way adds a class and its line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from vllm_elastic_ranks import ENDED, IMAGED, KEPT, PARKED, Group, alive

COLD = "cold"
_FACTS_S = 60.0


@dataclass(frozen=True, slots=True)
class Restored:
    """How a joiner's process came: by which tier, and the seconds of each part."""

    tier: str
    seconds: Mapping[str, Any] = field(default_factory=dict)


class Ended:
    """Leavers end; joiners are started, cold."""

    name: ClassVar[str] = ENDED

    def __init__(self, group: Group, imaging: Any = None) -> None:
        self.group = group
        self._imaging = imaging

    async def prepare(self, rank: int) -> dict[str, Any]:
        """What was done for `rank`, which joins in the next operation; {} if nothing was."""
        return {}

    async def see_off(self, ranks: Sequence[int]) -> dict[str, Any]:
        """By step, what there is to be measured of ranks that have left."""
        await self.end(ranks)
        return {}

    async def end(self, ranks: Sequence[int]) -> None:
        """Nobody of them is of use any more."""
        self.group.end(ranks)

    async def restore(self, rank: int, width: int) -> Restored:
        """The process of `rank`, which joins a group that grows to `width`. One that was started
        for an operation that failed is of no use."""
        await self.end([rank])
        self.group.start(rank, width, joins=True)
        return Restored(COLD)


class Kept(Ended):
    """Leavers live on as they are."""

    name = KEPT

    async def see_off(self, ranks: Sequence[int]) -> dict[str, Any]:
        # They answer once they have let go of what their peers used.
        post = self.group.post
        facts = {rank: (await post(rank, "/elastic_ep/facts", {}, _FACTS_S))[1] for rank in ranks}
        return {"left": facts}

    async def restore(self, rank: int, width: int) -> Restored:
        if rank not in self.group.pids or not alive(self.group.pids[rank]):
            return await super().restore(rank, width)
        return Restored(self.name)


class Parked(Kept):
    """Leavers live on without a GPU."""

    name = PARKED

    @cached_property
    def _parking(self) -> Any:
        from vllm_elastic_park import Parking  # needs a GPU's driver

        return Parking(self.group.folder / "parked.json")

    async def see_off(self, ranks: Sequence[int]) -> dict[str, Any]:
        found = await super().see_off(ranks)
        pids = {rank: self.group.pids[rank] for rank in ranks}
        return found | {"park": await asyncio.to_thread(self._parking.park, pids)}

    async def restore(self, rank: int, width: int) -> Restored:
        came = await super().restore(rank, width)
        if came.tier == COLD:
            return came
        seconds = await asyncio.to_thread(self._parking.bring_back, rank)
        return Restored(PARKED if seconds else KEPT, seconds)


class Imaged(Ended):
    """Leavers end; who joins comes from an image of a rank that booted without a group."""

    name = IMAGED

    async def prepare(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = await asyncio.to_thread(self._imaging.image_of, self.group, rank)
        return found if "image_bytes" in found else {}

    async def end(self, ranks: Sequence[int]) -> None:
        # Their next lives have the same pids.
        for rank in ranks:
            await asyncio.to_thread(self._imaging.end, self.group, rank)

    async def restore(self, rank: int, width: int) -> Restored:
        await self.end([rank])
        seconds = await asyncio.to_thread(self._imaging.bring_back, self.group, rank)
        return Restored(IMAGED, seconds)


TIERS: dict[str, type[Ended]] = {tier.name: tier for tier in (Ended, Kept, Parked, Imaged)}


def imaging_for(leavers: str, folder: Path) -> AbstractContextManager[Any]:
    """What makes images, and the namespace that the group runs in, if it needs them: both are gone
    with the command that uses it."""
    if leavers != IMAGED:
        return nullcontext()
    from vllm_elastic_images import imaging  # needs root and CRIU

    return imaging(folder)
