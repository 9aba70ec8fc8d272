"""dynamo-elastic-chaos: play numbered runs, play one again, and report on all of them.

dynamo-elastic-chaos run --first 0 --count 120 --add
dynamo-elastic-chaos replay 57
dynamo-elastic-chaos check .chaos/failed/57/history.json
dynamo-elastic-chaos report --onto benchmarks/results/chaos-2026-11-30.json
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.testing.chaos.checker import check as check_history
from dynamo_elastic.testing.chaos.etcd_members import SITES
from dynamo_elastic.testing.chaos.history import History
from dynamo_elastic.testing.chaos.report import PROVENANCE, write_report
from dynamo_elastic.testing.chaos.run import WINDOWS, Verdict, passed, run
from dynamo_elastic.testing.chaos.scenario import Resize, scenario
from dynamo_elastic.testing.chaos.world import World, missing_tools, world

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console(highlight=False)

WORK_DIR = Path(".chaos")
RUNS = "runs.jsonl"

WorkDir = Annotated[Path, typer.Option(help="Images, logs and verdicts.")]


@app.command("run")
def run_slice(
    first: Annotated[int, typer.Option(min=0, help="Number of the first run.")] = 0,
    count: Annotated[int, typer.Option(min=1)] = 100,
    add: Annotated[bool, typer.Option(help="To the verdicts that there are.")] = False,
    limit_s: Annotated[float, typer.Option(help="Begin no run after so many seconds.")] = 480.0,
    members: Annotated[int, typer.Option(help="Of etcd: 1 or 3.")] = 3,
    site: Annotated[int, typer.Option(min=0, max=SITES - 1, help="Sites run side by side.")] = 0,
    work_dir: WorkDir = WORK_DIR,
) -> None:
    """Play runs FIRST to FIRST + COUNT - 1 in one deployment, one after the other."""
    numbers = range(first, first + count)
    known = _verdicts(work_dir) if add else {}
    todo = [n for n in numbers if n not in known]
    if not add:
        (work_dir / RUNS).unlink(missing_ok=True)
    bad = asyncio.run(_play(work_dir.resolve(), todo, members, limit_s=limit_s, site=site))
    raise typer.Exit(1 if bad else 0)


@app.command()
def replay(
    number: Annotated[int, typer.Argument(min=0, metavar="SEED", help="Number of the run.")],
    times: Annotated[int, typer.Option(min=1)] = 1,
    members: Annotated[int, typer.Option(help="Of etcd: 1 or 3.")] = 3,
    work_dir: WorkDir = WORK_DIR,
) -> None:
    """Play one run again, in a deployment of its own; its verdict takes the place of the old."""
    numbers = [number] * times
    bad = asyncio.run(_play(work_dir.resolve(), numbers, members, limit_s=480.0))
    raise typer.Exit(1 if bad else 0)


@app.command()
def discover(work_dir: WorkDir = WORK_DIR) -> None:
    """Write down which failpoints each way of resizing passes: what `run` is made of."""
    found = asyncio.run(_discover(work_dir.resolve()))
    path = Path(__file__).with_name("places.json")
    path.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"{path}: {sum(map(len, found.values()))} places")


@app.command("check")
def check_file(path: Path) -> None:
    """Judge a history that was kept."""
    violations = check_history(History.load(path), WINDOWS)
    for violation in violations:
        console.print(f"{violation.rule}: {violation.what}")
    raise typer.Exit(1 if violations else 0)


@app.command()
def report(
    work_dir: Annotated[list[Path] | None, typer.Option(help="Each with verdicts.")] = None,
    onto: Annotated[
        Path | None, typer.Option(help="An earlier result, to which the verdicts are added.")
    ] = None,
) -> None:
    """Write benchmarks/results/chaos-DATE.json and .html, from a checkout. Verdicts that come from
    another machine are a report of their own, with the provenance.json that is beside them."""
    places = work_dir or [WORK_DIR]
    verdicts = {n: v for place in places for n, v in _verdicts(place).items()}
    beside = [place / PROVENANCE for place in places if (place / PROVENANCE).exists()]
    if beside and len(places) > 1:
        raise typer.BadParameter(f"{beside[0]}: report on one such directory at a time")
    made = json.loads(beside[0].read_text()) if beside else None
    for path in write_report(list(verdicts.values()), onto=onto, provenance=made):
        console.print(str(path))


async def _discover(work_dir: Path) -> dict[str, dict[str, list[str]]]:
    found = {}
    async with world(work_dir, members=1, say=console.print) as here:
        for resize in (Resize.UP, Resize.DOWN, Resize.UP_PARKED):
            found[str(resize)] = await passed(here, resize)
    return found


async def _play(
    work_dir: Path, numbers: list[int], members: int, *, limit_s: float, site: int = 0
) -> int:
    """Returns how many runs were bad. After one that hangs the deployment is made anew."""
    missing = missing_tools()
    if missing:
        raise typer.BadParameter(missing)
    logging.basicConfig(level=logging.ERROR)
    began_s, bad, todo = time.monotonic(), 0, list(numbers)
    while todo and time.monotonic() - began_s < limit_s:
        try:
            async with world(work_dir, members=members, say=console.print, site=site) as here:
                while todo and time.monotonic() - began_s < limit_s:
                    verdict = await _one(here, todo.pop(0), work_dir)
                    bad += not verdict.good
                    if verdict.hang:
                        break
        except ElasticError as exc:
            console.print(f"[red]the deployment did not end as it should: {exc}[/red]")
            bad += 1
    return bad


async def _one(here: World, number: int, work_dir: Path) -> Verdict:
    verdict, history = await run(here, scenario(number))
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
        _keep(here, verdict, history, work_dir / "failed" / str(number))
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


def _verdicts(work_dir: Path) -> dict[int, dict[str, object]]:
    """The newest verdict of each run."""
    path = work_dir / RUNS
    lines = path.read_text().splitlines() if path.exists() else []
    return {v["number"]: v for v in map(json.loads, lines)}


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
