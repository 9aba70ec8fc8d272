"""Numbered runs, one after the other, in one deployment; their verdicts are kept."""

from __future__ import annotations

import json
import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.testing.chaos.history import History
from dynamo_elastic.testing.chaos.image_run import run_on_images
from dynamo_elastic.testing.chaos.image_shop import ImageShop
from dynamo_elastic.testing.chaos.matrix import scenario
from dynamo_elastic.testing.chaos.run import run
from dynamo_elastic.testing.chaos.scenario import Scenario
from dynamo_elastic.testing.chaos.verdict import RUNS, Verdict
from dynamo_elastic.testing.chaos.world import World, world

console = Console(highlight=False)


async def play(
    work_dir: Path, numbers: list[int], members: int, *, limit_s: float, site: int = 0
) -> int:
    """Returns how many runs were bad. After one that hangs the deployment is made anew."""
    logging.basicConfig(level=logging.ERROR)
    began_s, bad, todo = time.monotonic(), 0, list(numbers)
    while todo and time.monotonic() - began_s < limit_s:
        try:
            async with world(work_dir, members=members, say=console.print, site=site) as here:
                table = _Table(here)
                try:
                    while todo and time.monotonic() - began_s < limit_s:
                        verdict = await _one(table, todo.pop(0), work_dir)
                        bad += not verdict.good
                        if verdict.hang:
                            break
                finally:
                    table.close()
        except ElasticError as exc:
            console.print(f"[red]the deployment did not end as it should: {exc}[/red]")
            bad += 1
    return bad


def verdicts_in(work_dir: Path) -> dict[int, dict[str, Any]]:
    """The newest verdict of each run."""
    path = work_dir / RUNS
    lines = path.read_text().splitlines() if path.exists() else []
    return {v["number"]: v for v in map(json.loads, lines)}


class _Table:
    """A world, and a shop in it from the first run on images on."""

    def __init__(self, here: World) -> None:
        self.world = here
        self._shop: ImageShop | None = None

    async def run(self, number: int) -> tuple[Verdict, History]:
        """Play one run."""
        one = scenario(number)
        if isinstance(one, Scenario):
            return await run(self.world, one)
        if self._shop is None:
            self._shop = ImageShop(self.world)
            await self._shop.open()
        return await run_on_images(self.world, self._shop, one)

    def close(self) -> None:
        """Nothing of the shop is left."""
        if self._shop is not None:
            with suppress(ElasticError):
                self._shop.close()


async def _one(table: _Table, number: int, work_dir: Path) -> Verdict:
    verdict, history = await table.run(number)
    with (work_dir / RUNS).open("a") as runs:
        runs.write(json.dumps(verdict.as_json()) + "\n")
    word = "ok" if verdict.good else "BAD"
    missed = "" if verdict.fired else " (not reached)"
    console.print(
        f"{word} {number}: {verdict.scenario}{missed}; {verdict.seconds:.1f} s, "
        f"{verdict.requests} requests, silence {verdict.silence_s:.2f} s",
        soft_wrap=True,
    )
    if not verdict.good:
        _keep(table.world, verdict, history, work_dir / "failed" / str(number))
    return verdict


def _keep(here: World, verdict: Verdict, history: History, directory: Path) -> None:
    """Everything that helps to see why; and how to play it again."""
    for why in (*verdict.violations, verdict.hang):
        if why:
            console.print(f"  {why}", soft_wrap=True, style="red")
    console.print(f"  again: dynamo-elastic-chaos replay {verdict.number}", style="red")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    history.save(directory / "history.json")
    (directory / "verdict.json").write_text(json.dumps(verdict.as_json(), indent=1))
    shutil.copytree(here.config.state_dir / "logs", directory / "logs")
    for slot in range(here.config.scale.max_ranks):
        log = here.config.control_dir(slot) / "engine.log"
        if log.exists():
            shutil.copy(log, directory / "logs" / f"engine{slot}.log")
