"""The report of every operation: made when it ends, whatever its end, and kept on disk.

Nothing waits for it. The first version is written at once; the second has the tokens that the
worker shells saw, which come a moment later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo_elastic.coordinator import steps
from dynamo_elastic.coordinator.observe import Event, EventName, Observer
from dynamo_elastic.coordinator.records import Keys, OperationRecord, RecordError, decode
from dynamo_elastic.coordinator.store import DeletePrefix, Store
from dynamo_elastic.coordinator.stories import story_of
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import StoreError
from dynamo_elastic.logs import log_fields
from dynamo_elastic.report.history import History
from dynamo_elastic.report.story import Story
from dynamo_elastic.report.traffic import WorkerTraffic

log = logging.getLogger(__name__)

TRAFFIC_TIMEOUT_S = 4.0
"""From the end of an operation: shells wait a second, to have what came right after it as well."""

OnStory = Callable[[Story], None]
OnSaved = Callable[[bool], None]
Blocking = Callable[..., Awaitable[Any]]


class Chronicle(Observer):
    """Writes the story of each operation that this coordinator has ended, in run()."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        timeline: Timeline,
        history: History,
        *,
        timeout_s: float,
        on_story: OnStory = lambda story: None,
        on_saved: OnSaved = lambda ok: None,
        blocking: Blocking = asyncio.to_thread,
    ) -> None:
        """`timeout_s` is that of an operation; `on_story` gets each story when it is complete;
        `on_saved` hears whether a report could be written; `blocking` runs what reads and writes
        files."""
        self._store = store
        self._keys = keys
        self._timeline = timeline
        self._history = history
        self._timeout_s = timeout_s
        self._on_story = on_story
        self._on_saved = on_saved
        self._blocking = blocking
        self._ended: asyncio.Queue[OperationRecord] = asyncio.Queue()

    def event(self, record: OperationRecord, event: Event) -> None:
        if event.name is EventName.END:
            self._ended.put_nowait(record)

    async def run(self) -> None:
        """Until it is cancelled. A report that can't be written is no reason to stop."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                # Beside each other: operations may end faster than shells answer.
                tasks.create_task(self._report(await self._ended.get()))

    async def _report(self, record: OperationRecord) -> None:
        with log_fields(operation_id=record.operation_id, epoch=record.plan.after.epoch):
            await self._tell(record)

    async def _tell(self, record: OperationRecord) -> None:
        events = await self._blocking(self._timeline.events_of, record.operation_id)
        story = story_of(record, self._keys.deployment, self._timeout_s, events)
        await self._save(story)
        traffic = await self._traffic(record)
        if traffic:
            story = story_of(record, self._keys.deployment, self._timeout_s, events, traffic)
            await self._save(story)
        self._on_story(story)

    async def _save(self, story: Story) -> None:
        try:
            path = await self._blocking(self._history.save, story)
        except OSError as exc:
            log.warning("no report of %s: %s", story.operation_id, exc)
            self._on_saved(False)
        else:
            log.info("report of %s: %s", story.operation_id, path)
            self._on_saved(True)

    async def _traffic(self, record: OperationRecord) -> tuple[WorkerTraffic, ...]:
        """What the shells have said of their tokens; it is deleted then."""
        prefix = self._keys.all_traffic(record.operation_id)
        expected = {w for w in steps.everyone(record) if w not in record.lost}
        found: dict[str, WorkerTraffic] = {}
        try:
            async with asyncio.timeout(TRAFFIC_TIMEOUT_S), self._store.watch(prefix) as watch:
                found |= _read({v.key: v.value for v in watch.snapshot}, prefix)
                if not found.keys() >= expected:
                    async for change in watch:
                        if change.value is not None:
                            found |= _read({change.key: change.value}, prefix)
                        if found.keys() >= expected:
                            break
        except TimeoutError:
            log.debug("tokens of %s: %d of %d", record.operation_id, len(found), len(expected))
        except (StoreError, RecordError) as exc:
            log.warning("tokens of %s can't be read: %s", record.operation_id, exc)
        try:
            # Nobody else looks at them, whoever leads by now.
            await self._store.txn([], [DeletePrefix(prefix)])
        except StoreError as exc:
            log.warning("tokens of %s go with their leases: %s", record.operation_id, exc)
        return tuple(found[w] for w in sorted(found) if found[w].tokens)


def _read(values: Mapping[str, bytes], prefix: str) -> dict[str, WorkerTraffic]:
    return {k.removeprefix(prefix): decode(WorkerTraffic, v) for k, v in values.items()}
