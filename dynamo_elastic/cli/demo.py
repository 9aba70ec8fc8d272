"""`dynamo-elastic demo`: what `make demo` runs."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynamo_elastic.cli.serve import stop_on_signal
from dynamo_elastic.errors import ElasticError


class DemoEngine(StrEnum):
    """Which engine the demo is played with."""

    REFERENCE = "reference"
    VLLM = "vllm"


def demo(
    work_dir: Annotated[
        Path, typer.Option(help="Where the demo's model and images are kept.")
    ] = Path(".demo"),
    engine: Annotated[
        DemoEngine, typer.Option(help="Our reference engine, or vLLM on the CPU.")
    ] = DemoEngine.REFERENCE,
) -> None:
    """Grow and shrink a small served model by planner decisions, and check every token."""
    console = Console(highlight=False)
    faults = asyncio.run(_demo(work_dir.resolve(), engine, console))
    if faults:
        raise ElasticError("the demo failed: " + "; ".join(faults))
    console.print("[bold green]all of it held[/bold green]")


async def _demo(work_dir: Path, engine: DemoEngine, console: Console) -> list[str]:
    # These bring torch: seconds that other commands spare.
    from dynamo_elastic.demo.run import reference_script, run_demo
    from dynamo_elastic.demo.vllm import vllm_script

    stop_on_signal()
    script = vllm_script if engine is DemoEngine.VLLM else reference_script
    return await run_demo(script(work_dir), console)
