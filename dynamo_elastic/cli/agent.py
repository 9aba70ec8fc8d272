"""`dynamo-elastic agent status | drain | undrain`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.cli.images import print_json
from dynamo_elastic.cli.serve import ConfigFile
from dynamo_elastic.config import load_config
from dynamo_elastic.errors import EngineError, EngineGone

app = typer.Typer(help="The agent of this host: what it runs, and draining it.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
T = TypeVar("T")


@app.command()
def status(file: ConfigFile, as_json: AsJson = False) -> None:
    """Show slots, images, what can't be done here and why."""

    async def ask(agent: AgentClient) -> dict[str, Any]:
        slots = [asdict(slot) for slot in await agent.slots()]
        return {"slots": slots, **await agent.status()}

    now = _ask(file, ask)
    if as_json:
        print_json(now)
        return
    for slot in now["slots"]:
        engine = f"{slot['incarnation']} ({slot['tier']}, pid {slot['pid']})"
        shown = engine if slot["pid"] else "free"
        typer.echo(f"slot {slot['slot']}: {shown}; image {slot['image_id'] or 'none'}")
    if now["draining"]:
        typer.echo(f"drains: {now['draining']}")
    for image, reason in now["quarantine"].items():
        typer.echo(f"{image}: {reason}")
    for line in (*now["skipped"], *now["no_image"].values(), *now["tidied"]):
        typer.echo(line)


@app.command()
def drain(
    file: ConfigFile,
    reason: Annotated[str, typer.Option(help="Told to whoever asks for an engine.")] = "",
    as_json: AsJson = False,
) -> None:
    """Start no more engines on this host; those that serve go on, images are kept."""
    answer = _ask(file, lambda agent: agent.drain(reason))
    if as_json:
        print_json(answer)
        return
    serving = ", ".join(map(str, answer["serving"])) or "none"
    typer.echo(f"drains: {answer['draining']}; slots that still serve: {serving}")


@app.command()
def undrain(file: ConfigFile, as_json: AsJson = False) -> None:
    """Start engines again when asked to."""
    _ask(file, lambda agent: agent.undrain())
    if as_json:
        print_json({"draining": ""})


def _ask(file: Path, call: Callable[[AgentClient], Awaitable[T]]) -> T:
    config = load_config(file)

    async def run() -> T:
        agent = AgentClient(config.agent_socket)
        try:
            return await call(agent)
        except EngineGone as exc:
            raise EngineError(
                f"no agent answers on {config.agent_socket}; is the deployment served?"
            ) from exc
        finally:
            await agent.close()

    return asyncio.run(run())
