"""`dynamo-elastic demo`: what `make demo` runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynamo_elastic.cli.serve import stop_on_signal
from dynamo_elastic.errors import ElasticError


def demo(
    work_dir: Annotated[
        Path, typer.Option(help="Where the demo's model and images are kept.")
    ] = Path(".demo"),
) -> None:
    """Grow and shrink a small served model by planner decisions, and check every token."""
    console = Console(highlight=False)
    faults = asyncio.run(_demo(work_dir, console))
    if faults:
        raise ElasticError("the demo failed: " + "; ".join(faults))
    console.print("[bold green]all of it held[/bold green]")


async def _demo(work_dir: Path, console: Console) -> list[str]:
    from dynamo_elastic.demo.run import run_demo  # brings torch: seconds that other commands spare

    stop_on_signal()
    return await run_demo(work_dir.resolve(), console)
