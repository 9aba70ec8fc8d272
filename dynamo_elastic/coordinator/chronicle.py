"""The report of every operation: made when it ends, whatever its end, and kept on disk.

Nothing waits for it. The first version is written at once; the second has the tokens that the
worker shells saw, which come a moment later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from dynamo_elastic.coordinator import steps
from dynamo_elastic.coordinator.observe import Event, EventName, Observer
from dynamo_elastic.coordinator.records import Keys, OperationRecord, decode
from dynamo_elastic.coordinator.store import DeletePrefix, Store
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.errors import StoreError
from dynamo_elastic.phases import TERMINAL, Phase
from dynamo_elastic.report.history import History
from dynamo_elastic.report.story import Part, PhaseSpan, Role, StepOutcome, StepSpan, Story
from dynamo_elastic.report.traffic import WorkerTraffic
from dynamo_elastic.types import WorkerId

log = logging.getLogger(__name__)

TRAFFIC_TIMEOUT_S = 4.0
"""From the end of an operation: shells wait a second, to have what came right after it as well."""

OnStory = Callable[[Story], None]


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
    ) -> None:
        """`timeout_s` is that of an operation; `on_story` gets each story when it is complete."""
        self._store = store
        self._keys = keys
        self._timeline = timeline
        self._history = history
        self._timeout_s = timeout_s
        self._on_story = on_story
        self._ended: asyncio.Queue[OperationRecord] = asyncio.Queue()

    def event(self, record: OperationRecord, event: Event) -> None:
        if event.name is EventName.END:
            self._ended.put_nowait(record)

    async def run(self) -> None:
        """Until it is cancelled. A report that can't be written is no reason to stop."""
        while True:
            await self._tell(await self._ended.get())

    async def _tell(self, record: OperationRecord) -> None:
        events = await asyncio.to_thread(self._timeline.events_of, record.operation_id)
        story = story_of(record, self._keys.deployment, self._timeout_s, events)
        await self._save(story)
        traffic = await self._traffic(record)
        if traffic:
            story = story_of(record, self._keys.deployment, self._timeout_s, events, traffic)
            await self._save(story)
        self._on_story(story)

    async def _save(self, story: Story) -> None:
        try:
            path = await asyncio.to_thread(self._history.save, story)
        except OSError as exc:
            log.warning("no report of %s: %s", story.operation_id, exc)
        else:
            log.info("report of %s: %s", story.operation_id, path)

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
        except StoreError as exc:
            log.warning("tokens of %s can't be read: %s", record.operation_id, exc)
        try:
            # Nobody else looks at them, whoever leads by now.
            await self._store.txn([], [DeletePrefix(prefix)])
        except StoreError as exc:
            log.warning("tokens of %s go with their leases: %s", record.operation_id, exc)
        return tuple(found[w] for w in sorted(found) if found[w].tokens)


def _read(values: Mapping[str, bytes], prefix: str) -> dict[str, WorkerTraffic]:
    return {k.removeprefix(prefix): decode(WorkerTraffic, v) for k, v in values.items()}


def story_of(
    record: OperationRecord,
    deployment: str,
    timeout_s: float,
    events: Iterable[Mapping[str, Any]] = (),
    traffic: tuple[WorkerTraffic, ...] = (),
    *,
    now_s: float | None = None,
) -> Story:
    """What is known of the operation of `record`: with the `events` of its timeline what every rank
    did when. One that is under way is told up to `now_s`."""
    plan, over = record.plan, record.phase in TERMINAL
    so_far_s = record.elapsed_s if over or now_s is None else max(0.0, now_s - record.opened_at_s)
    return Story(
        deployment=deployment,
        operation_id=record.operation_id,
        kind=record.kind,
        phase=record.phase,
        epoch=plan.after.epoch,
        source=record.source,
        request_id=record.request_id,
        ranks_before=plan.before.world_size,
        ranks_after=plan.after.world_size,
        opened_at_s=record.opened_at_s,
        elapsed_s=so_far_s,
        deadline_at_s=record.opened_at_s + timeout_s,
        parts=tuple(_parts(record)),
        phases=tuple(_phases(record)),
        steps=tuple(_steps(events)),
        traffic=traffic,
        failure=record.failure,
        lost=record.lost,
        safe_to_release=record.safe_to_release,
    )


def _parts(record: OperationRecord) -> Iterable[Part]:
    plan = record.plan
    roles = dict.fromkeys(plan.retained, Role.RETAINED) | dict.fromkeys(plan.joiners, Role.JOINER)
    for worker, role in (roles | dict.fromkeys(plan.leavers, Role.LEAVER)).items():
        topology = plan.before if role is Role.LEAVER else plan.after
        said = record.participants.get(WorkerId(worker), "")
        yield Part(worker, role, topology.rank_of(worker), said)


def _phases(record: OperationRecord) -> Iterable[PhaseSpan]:
    over = record.phase in TERMINAL
    for now, after in pairwise([*record.phases, None]):
        if now is None:
            return
        elapsed_s: float | None = now.elapsed_s
        if not now.elapsed_s:  # nobody saw it end
            ended_at_s = after.started_at_s if after else record.opened_at_s + record.elapsed_s
            elapsed_s = max(0.0, ended_at_s - now.started_at_s) if after or over else None
        failed = after is not None and after.phase is Phase.ABORTING
        yield PhaseSpan(now.phase, now.started_at_s, elapsed_s, failed, now.detail)


def _steps(events: Iterable[Mapping[str, Any]]) -> Iterable[StepSpan]:
    for event in events:
        if event["event"] != EventName.STEP:
            continue
        detail = event["detail"]
        for worker, said in detail["workers"].items():
            began_at_s, elapsed_s = _within(event, said)
            yield StepSpan(
                phase=event["phase"],
                step=detail["step"],
                worker=worker,
                began_at_s=began_at_s,
                elapsed_s=elapsed_s,
                outcome=StepOutcome(said["outcome"]),
                reason=said.get("reason", ""),
                facts=said.get("facts", {}),
            )


def _within(event: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[float, float]:
    """Beginning and length of a rank's step by our own clock: clocks of hosts differ, but the step
    was inside the time that we waited for it."""
    asked_at_s, waited_s = float(event["detail"]["asked_at_s"]), float(event["elapsed_s"])
    elapsed_s = min(float(said["elapsed_s"]), waited_s)
    latest_s = asked_at_s + waited_s - elapsed_s
    return min(max(float(said["began_at_s"]), asked_at_s), latest_s), elapsed_s
