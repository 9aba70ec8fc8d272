"""dynamo-elastic-chaos: play numbered runs, play one again, and report on all of them.

dynamo-elastic-chaos run --first 0 --count 120 --add
dynamo-elastic-chaos replay 57
dynamo-elastic-chaos check .chaos/failed/57/history.json
dynamo-elastic-chaos report --onto benchmarks/results/chaos-DATE.json
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynamo_elastic.testing.chaos.checker import check as check_history
from dynamo_elastic.testing.chaos.etcd_members import SITES
from dynamo_elastic.testing.chaos.history import History
from dynamo_elastic.testing.chaos.matrix import scenario
from dynamo_elastic.testing.chaos.play import play, verdicts_in
from dynamo_elastic.testing.chaos.report import PROVENANCE, write_report
from dynamo_elastic.testing.chaos.run import WINDOWS, passed
from dynamo_elastic.testing.chaos.scenario import Resize
from dynamo_elastic.testing.chaos.tally import has_enough
from dynamo_elastic.testing.chaos.verdict import RUNS
from dynamo_elastic.testing.chaos.world import missing_tools, world

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console(highlight=False)

WORK_DIR = Path(".chaos")

WorkDir = Annotated[Path, typer.Option(help="Images, logs and verdicts.")]


@app.command("run")
def run_slice(
    first: Annotated[int, typer.Option(min=0, help="Number of the first run.")] = 0,
    count: Annotated[int, typer.Option(min=1)] = 100,
    add: Annotated[bool, typer.Option(help="To the verdicts that there are.")] = False,
    limit_s: Annotated[float, typer.Option(help="Begin no run after so many seconds.")] = 480.0,
    members: Annotated[int, typer.Option(help="Of etcd: 1 or 3.")] = 3,
    site: Annotated[int, typer.Option(min=0, max=SITES - 1, help="Sites run side by side.")] = 0,
    lacking: Annotated[
        Path | None,
        typer.Option(
            help="One run of each fault at a failpoint that this result lacks, or has hit less "
            "than 3 times."
        ),
    ] = None,
    work_dir: WorkDir = WORK_DIR,
) -> None:
    """Play runs FIRST to FIRST + COUNT - 1 in one deployment, one after the other. From 100000 on
    they are work on images."""
    known = verdicts_in(work_dir) if add else {}
    todo = [n for n in range(first, first + count) if n not in known]
    if lacking is not None:
        result = json.loads(lacking.read_text())
        todo = [n for n in todo if not has_enough(result, *scenario(n).cell)]
        todo = sorted({scenario(n).cell: n for n in reversed(todo)}.values())
    _check_tools()
    if not add:
        (work_dir / RUNS).unlink(missing_ok=True)
    bad = asyncio.run(play(work_dir.resolve(), todo, members, limit_s=limit_s, site=site))
    raise typer.Exit(1 if bad else 0)


@app.command()
def replay(
    number: Annotated[int, typer.Argument(min=0, metavar="SEED", help="Number of the run.")],
    times: Annotated[int, typer.Option(min=1)] = 1,
    members: Annotated[int, typer.Option(help="Of etcd: 1 or 3.")] = 3,
    work_dir: WorkDir = WORK_DIR,
) -> None:
    """Play one run again, in a deployment of its own; its verdict takes the place of the old."""
    _check_tools()
    numbers = [number] * times
    bad = asyncio.run(play(work_dir.resolve(), numbers, members, limit_s=480.0))
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
    verdicts = {n: v for place in places for n, v in verdicts_in(place).items()}
    beside = [place / PROVENANCE for place in places if (place / PROVENANCE).exists()]
    if beside and len(places) > 1:
        raise typer.BadParameter(f"{beside[0]}: report on one such directory at a time")
    made = json.loads(beside[0].read_text()) if beside else None
    for path in write_report(list(verdicts.values()), onto=onto, provenance=made):
        console.print(str(path))


def _check_tools() -> None:
    missing = missing_tools()
    if missing:
        raise typer.BadParameter(missing)


async def _discover(work_dir: Path) -> dict[str, dict[str, list[str]]]:
    found = {}
    async with world(work_dir, members=1, say=console.print) as here:
        for resize in (Resize.UP, Resize.DOWN, Resize.UP_PARKED):
            found[str(resize)] = await passed(here, resize)
    return found


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
