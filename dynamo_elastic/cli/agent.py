"""`dynamo-elastic agent status | evict | drain | undrain`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dynamo_elastic.agent.base import SlotState
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.cli.images import print_json
from dynamo_elastic.cli.serve import ConfigFile
from dynamo_elastic.config import load_config
from dynamo_elastic.errors import ConfigError, EngineError, EngineGone

app = typer.Typer(help="The agent of this host: what it runs, and draining it.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
T = TypeVar("T")


@app.command()
def status(file: ConfigFile, as_json: AsJson = False) -> None:
    """Show slots, who holds them, images, what can't be done here and why."""

    async def ask(agent: AgentClient) -> dict[str, Any]:
        slots = [asdict(slot) for slot in await agent.slots()]
        return {"slots": slots, **await agent.status()}

    now = _ask(file, ask)
    if as_json:
        print_json(now)
        return
    for slot in now["slots"]:
        image = slot["image_id"] or "none"
        typer.echo(f"slot {slot['slot']}: {_shown(slot)}; image {image}")
        for reason in slot["fell_through"]:
            typer.echo(f"  not from {reason}")
    if now["draining"]:
        typer.echo(f"drains: {now['draining']}")
    for image, reason in now["quarantine"].items():
        typer.echo(f"{image}: {reason}")
    for line in (*now["skipped"], *now["no_image"].values(), *now["tidied"]):
        typer.echo(line)


@app.command()
def evict(
    file: ConfigFile,
    slot: Annotated[str, typer.Argument(help="A slot, or 'all'.", metavar="SLOT|all")],
    as_json: AsJson = False,
) -> None:
    """End the engine that is parked in a slot; those that serve are left alone."""
    if slot != "all" and not slot.isdecimal():
        raise ConfigError([f"SLOT: {slot!r} is neither a slot nor 'all'"])
    number = None if slot == "all" else int(slot)
    evicted = _ask(file, lambda agent: agent.evict(number))
    if as_json:
        print_json({"evicted": evicted})
    else:
        typer.echo(f"evicted from slots: {_list(evicted)}")


@app.command()
def drain(
    file: ConfigFile,
    reason: Annotated[str, typer.Option(help="Told to whoever asks for an engine.")] = "",
    as_json: AsJson = False,
) -> None:
    """Start no more engines on this host and end those that are parked; those that serve go on,
    images are kept."""
    answer = _ask(file, lambda agent: agent.drain(reason))
    if as_json:
        print_json(answer)
        return
    typer.echo(
        f"drains: {answer['draining']}; slots that still serve: {_list(answer['serving'])}; "
        f"parked engines ended: {_list(answer['evicted'])}"
    )


@app.command()
def undrain(file: ConfigFile, as_json: AsJson = False) -> None:
    """Start engines again when asked to."""
    _ask(file, lambda agent: agent.undrain())
    if as_json:
        print_json({"draining": ""})


def _shown(slot: Mapping[str, Any]) -> str:
    if slot["state"] == SlotState.SERVING:
        engine = f"{slot['incarnation']} ({slot['tier']}, pid {slot['pid']})"
        return f"serving {engine}, held by {slot['held_by']}"
    if slot["state"] == SlotState.PARKED:
        size = f"{slot['parked_bytes'] / (1 << 20):.0f} MiB of host memory"
        return f"parked for {slot['parked_s']:.0f} s (pid {slot['pid']}, {size})"
    return str(slot["state"])


def _list(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots)) or "none"


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
