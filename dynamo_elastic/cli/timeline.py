"""`dynamo-elastic timeline [OP]`: what one operation did when, as a Gantt chart of text."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynamo_elastic.cli.serve import ConfigFile
from dynamo_elastic.config import DeploymentConfig, load_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.coordinator.stories import story_of
from dynamo_elastic.coordinator.timeline import TIMELINE_FILE, Timeline
from dynamo_elastic.errors import ConfigError, StoreError
from dynamo_elastic.report.gantt import gantt
from dynamo_elastic.report.history import LAST, History, NoSuchOperation
from dynamo_elastic.report.page import page
from dynamo_elastic.report.story import Story, encode_story
from dynamo_elastic.report.words import seconds, time_of_day

_PIPE_WIDTH = 120
_LISTED = 50


def timeline(
    file: ConfigFile,
    operation: Annotated[
        str, typer.Argument(help="An operation's id, how it begins, or 'last'.", metavar="OP")
    ] = LAST,
    list_all: Annotated[bool, typer.Option("--list", help="List those that are kept.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the story as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the report to this file instead.")
    ] = None,
) -> None:
    """Show phases, ranks, bytes and gaps of an operation over time, or list those that are kept.

    Those that ended are read where the coordinator keeps them, on its host; the one under way and
    the last one come from etcd as well, with less detail.
    """
    if list_all + as_json + (html is not None) > 1:
        raise ConfigError(["--list, --json, --html: choose one"])
    config = load_config(file)
    history = History(config.operations_dir, config.observe.keep_operations)
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(highlight=False, width=width)
    if list_all:
        console.print(_listed(history.newest(_LISTED)))
        return
    story = _find(config, history, operation)
    if as_json:
        print(encode_story(story).decode(), end="")
    elif html is not None:
        html.write_text(page(story))
        print(html)
    else:
        console.print(gantt(story, console.width))
        kept = history.page_of(story.operation_id)
        if kept is not None:
            console.print(f"\nreport: {kept}", markup=False)


def _find(config: DeploymentConfig, history: History, name: str) -> Story:
    """The operation under way if it is meant, else one that is kept, else etcd's last one."""
    try:
        stored = {s.operation_id: s for s in asyncio.run(_stored(config))}
    except StoreError:
        stored = {}
    running = [s for s in stored.values() if not s.over]
    if running and (name == LAST or running[0].operation_id.startswith(name)):
        return running[0]
    try:
        return history.find(name)
    except NoSuchOperation:
        last = [s for s in stored.values() if name == LAST or s.operation_id.startswith(name)]
        if not last:
            raise
        return last[0]


async def _stored(config: DeploymentConfig) -> list[Story]:
    """The operation under way and the last one, as etcd has them; with what this host's timeline
    says of them. Raises StoreError."""
    store = EtcdStore.of(config.etcd)
    try:
        status = await read_status(store, Keys(config.deployment))
    finally:
        await store.close()
    events = Timeline(config.state_dir / TIMELINE_FILE)
    timeout_s = config.scale.operation_timeout_s
    return [
        story_of(
            record,
            config.deployment,
            timeout_s,
            events.events_of(record.operation_id),
            now_s=time.time(),
        )
        for record in (status.operation, status.last)
        if record is not None
    ]


def _listed(stories: list[Story]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("operation", "opened", "ranks", "ended", "took", "longest gap", "why"):
        table.add_column(name, justify="right" if name in ("took", "longest gap") else "left")
    for story in stories:
        gap = story.longest_gap
        table.add_row(
            story.operation_id,
            time_of_day(story.opened_at_s),
            f"{story.ranks_before} → {story.ranks_after}",
            story.phase,
            seconds(story.elapsed_s),
            seconds(gap.elapsed_s) if gap else "",
            story.failure,
        )
    return table
