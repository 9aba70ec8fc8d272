"""A soak: 1 -> 4 -> 2 -> 3 -> 1 ranks, again and again, under streaming load, all of it counted.

What the streams said is folded into a Tally after every operation, so that the soak itself does
not grow with the requests it makes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.demo.load import Load, Prompt, StreamResult, reference_texts
from dynamo_elastic.demo.run import demo_config
from dynamo_elastic.demo.view import PhaseFacts
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.testing.cycles import Footprints, MovedRequests, footprints, scale_to

WIDTHS = (4, 2, 3, 1)
"""Of one cycle, which begins with one rank."""

_SHOWN_ERRORS = 5
_REFERENCE_TIMEOUT_S = 60.0


def soak_config(work_dir: Path, deployment: str) -> DeploymentConfig:
    """The demo's model with ranks that can hold all of its experts alone, and joiners that are
    restored from images. Without a planner."""
    return demo_config(
        work_dir,
        deployment,
        planner={"enabled": False},
        scale={"initial_ranks": 1, "min_ranks": 1},
        engine={"slots_per_rank": 16},
        snapshot={"parked": {"enabled": False}},
    )


@dataclass(slots=True)
class Tally:
    """All streams so far. `reference` is the text of each prompt, from one rank that never
    scaled; gaps are between two tokens of one stream."""

    reference: dict[str, str]
    requests: int = 0
    failed: int = 0
    unequal: int = 0
    moved: int = 0
    """Of the streams that ended well, how many had been moved."""
    gap_max_s: float = 0.0
    """Of streams that stayed where they began."""
    moved_gap_max_s: float = 0.0
    errors: set[str] = field(default_factory=set)
    _awaited: set[str] = field(default_factory=set)
    """Moved, and not ended yet."""

    def add(self, results: list[StreamResult], moved: set[str]) -> None:
        """Take in streams that ended, and the ids of those that were moved before now."""
        self._awaited |= moved
        for result in results:
            self._add(result, result.request_id in self._awaited)
            self._awaited.discard(result.request_id)

    def _add(self, result: StreamResult, moved: bool) -> None:
        self.requests += 1
        if result.error:
            self.failed += 1
            self.errors = set(sorted(self.errors | {result.error})[:_SHOWN_ERRORS])
            return
        self.unequal += result.text != self.reference.get(result.prompt.key)
        if moved:
            self.moved += 1
            self.moved_gap_max_s = max(self.moved_gap_max_s, result.max_gap_s)
        else:
            self.gap_max_s = max(self.gap_max_s, result.max_gap_s)


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle as it was measured at its end, with one rank serving."""

    elapsed_s: float
    footprints: Footprints
    etcd_keys: int
    tiers: frozenset[str]
    """Where its joiners came from."""
    drained: int
    """Requests that its leavers sent on, as they acknowledged it."""


@dataclass(slots=True)
class SoakResult:
    """All cycles, and all streams."""

    tally: Tally
    cycles: list[Cycle] = field(default_factory=list)


async def soak(
    config: DeploymentConfig,
    prompts: list[Prompt],
    *,
    clients: int,
    cycles: int,
    settle_s: float,
    say: Callable[[str], None],
    progress: Callable[[SoakResult], None] = lambda _: None,
) -> SoakResult:
    """Serve `config` and run `cycles` under load; each is measured `settle_s` after its last
    operation. Raises ElasticError if an operation is not done."""
    async with running(config, say) as deployment:
        load = Load(deployment.url, config.model.name, prompts, clients)
        moved = MovedRequests(config)
        load.start()
        await load.wait_for_each_prompt(timeout_s=_REFERENCE_TIMEOUT_S)
        result = SoakResult(Tally(reference_texts(load.results)))
        for _ in range(cycles):
            result.cycles.append(await _cycle(deployment, load, moved, result.tally, settle_s))
            progress(result)
        await load.stop()
        result.tally.add(load.take(), moved.new())
    return result


async def _cycle(
    deployment: Deployment, load: Load, moved: MovedRequests, tally: Tally, settle_s: float
) -> Cycle:
    began_s = time.monotonic()
    facts: list[PhaseFacts] = []
    for ranks in WIDTHS:
        record = await scale_to(deployment, ranks)
        facts += [PhaseFacts.of(p.detail) for p in record.phases]
        # Ids first: who has ended by now was moved before.
        ids = moved.new()
        tally.add(load.take(), ids)
    elapsed_s = time.monotonic() - began_s
    await asyncio.sleep(settle_s)
    return Cycle(
        elapsed_s,
        await footprints(deployment),
        len(await deployment.store.get_prefix(deployment.keys.prefix)),
        tiers=frozenset(t for f in facts for t in f.tiers),
        drained=sum(f.moved for f in facts),
    )
