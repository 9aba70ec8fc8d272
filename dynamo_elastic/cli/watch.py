"""`dynamo-elastic watch`: the status, drawn anew whenever something changes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dynamo_elastic.agent.base import SlotStatus
from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.cli.look import picture, slots_of
from dynamo_elastic.cli.serve import ConfigFile, stop_on_signal
from dynamo_elastic.cli.status_view import view
from dynamo_elastic.config import DeploymentConfig, load_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.store import Store, Versioned
from dynamo_elastic.errors import StoreError

_FRAME_S = 0.25
"""Between two drawings while an operation is under way; at other times a change is waited for."""
_AGENT_EVERY_S = 1.0
_RETRY_S = 0.5

Draw = Callable[[], None]


def watch(
    file: ConfigFile,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as text.")] = False,
) -> None:
    """Show the ranks, GPU slots and the operation under way, live; Ctrl-C ends it.

    Into a pipe it prints once.
    """
    config = load_config(file)
    asyncio.run(_watch(config, once=once or not sys.stdout.isatty()))


async def _watch(config: DeploymentConfig, *, once: bool) -> None:
    store, agent = EtcdStore.of(config.etcd), AgentClient(config.agent_socket)
    console = Console(highlight=False)
    looker = Looker(config, store, agent)
    try:
        if once:
            await looker.look()
            console.print(looker.drawing())
            return
        stop_on_signal()
        with screen(console) as live:
            await looker.follow(lambda: live.update(looker.drawing(), refresh=True))
    except asyncio.CancelledError:
        if once:
            raise
    finally:
        await agent.close()
        await store.close()


@contextmanager
def screen(console: Console) -> Iterator[Live]:
    """The alternate screen, left as it was found."""
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        yield live


class Looker:
    """Everything stored under a deployment's prefix, kept up to date by one watch."""

    def __init__(self, config: DeploymentConfig, store: Store, agent: AgentClient) -> None:
        self._config = config
        self._store = store
        self._agent = agent
        self._keys = Keys(config.deployment)
        self._stored: dict[str, Versioned] = {}
        self._slots: tuple[tuple[SlotStatus, ...] | None, str] = (None, "not asked yet")
        self._trouble = ""
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()  # etcd, or that it does not

    async def look(self) -> None:
        """Read all of it once. Raises StoreError."""
        stored = await self._store.get_prefix(self._keys.prefix)
        self._stored = {v.key: v for v in stored}
        self._slots = await slots_of(self._agent)

    def drawing(self) -> RenderableType:
        """As it is now, or as it was when etcd last answered."""
        shown = view(picture(self._config, self._stored, self._slots, time.time()))
        note = "Ctrl-C to end" if not self._trouble else f"{self._trouble}; this is what was known"
        return Group(shown, Text(), Text(note, "red" if self._trouble else "dim"))

    async def follow(self, draw: Draw) -> None:
        """Call `draw` at first and after each change, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_store())
            tasks.create_task(self._follow_agent())
            await self._answered.wait()
            while True:
                self._changed.clear()
                draw()
                await asyncio.sleep(_FRAME_S)
                if self._keys.operation not in self._stored:
                    await self._changed.wait()

    async def _follow_store(self) -> None:
        while True:
            try:
                async with self._store.watch(self._keys.prefix) as watch:
                    self._stored = {v.key: v for v in watch.snapshot}
                    self._trouble = ""
                    self._answered.set()
                    self._changed.set()
                    async for change in watch:
                        self._take(change.key, change.value, change.mod_revision)
            except StoreError as exc:
                self._trouble = f"etcd: {exc}"
                self._answered.set()
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    def _take(self, key: str, value: bytes | None, revision: int) -> None:
        if value is None:
            self._stored.pop(key, None)
        else:
            self._stored[key] = Versioned(key, value, revision, revision)
        self._changed.set()

    async def _follow_agent(self) -> None:
        while True:
            slots = await slots_of(self._agent)
            if slots != self._slots:
                self._slots = slots
                self._changed.set()
            await asyncio.sleep(_AGENT_EVERY_S)
