"""What is kept of operations: stories of done and aborted ones, over a change of leaders too; the
page, the API and the metrics say the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from dynamo_elastic.config_sections import ApiConfig
from dynamo_elastic.coordinator.api import ApiServer
from dynamo_elastic.coordinator.chronicle import TRAFFIC_TIMEOUT_S, Chronicle
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.measure import Measure
from dynamo_elastic.coordinator.observe import Event, EventName, Observers
from dynamo_elastic.coordinator.records import encode
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.coordinator.timeline import Timeline
from dynamo_elastic.metrics import CoordinatorMetrics
from dynamo_elastic.phases import Kind, Phase, Step, phases_of
from dynamo_elastic.report.history import History
from dynamo_elastic.report.story import Role, StepOutcome, Story
from dynamo_elastic.report.traffic import Gap, WorkerTraffic
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.etcd_process import free_port
from dynamo_elastic.testing.participants import Misbehaviour, Script
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.testing.virtual_time import wall_clock
from dynamo_elastic.types import WorkerId

TIMEOUT_S = 300.0


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """In virtual time there are no threads."""
    return function(*arguments)


class Watched:
    """A coordinator of fakes that keeps its history in a directory."""

    def __init__(self, here: World, directory: Path) -> None:
        self.here = here
        self.metrics = CoordinatorMetrics()
        self.history = History(directory / "operations", keep=20)
        self.told: list[Story] = []
        measure = Measure(self.metrics)
        timeline = Timeline(directory / "timeline.jsonl")

        def on_story(story: Story) -> None:
            measure.story(story)
            self.told.append(story)

        self.chronicle = Chronicle(
            here.store,
            here.keys,
            timeline,
            self.history,
            timeout_s=300,
            on_story=on_story,
            on_saved=measure.saved,
            blocking=at_once,
        )
        observers = Observers(timeline, measure, self.chronicle)
        self.deployment = Deployment(here.keys, CONFIG, SHAPE, observers, wall_clock)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Watched]:
        tasks = {
            asyncio.create_task(Coordinator(self.here.store, self.deployment, "c").run()),
            asyncio.create_task(self.chronicle.run()),
        }
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def stories(self, count: int) -> list[Story]:
        """Once so many have been told: all of them, in the order of their operations."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.told) < count:
                await asyncio.sleep(0.1)
        return sorted(self.told, key=lambda story: story.epoch)


@asynccontextmanager
async def watched(directory: Path) -> AsyncIterator[Watched]:
    async with world(FakeStore(), 4) as here, Watched(here, directory).running() as seen:
        await here.until(CONFIG.initial_ranks, timeout_s=TIMEOUT_S)
        yield seen


async def scale(here: World, ranks: int) -> None:
    request_id = await request_scale(here.store, here.keys, ranks, "test")
    await wait_outcome(here.store, here.keys, request_id, timeout_s=TIMEOUT_S)


def test_every_rank_has_its_place_in_the_story(tmp_path: Path) -> None:
    async def main() -> tuple[list[Story], CoordinatorMetrics, History]:
        async with watched(tmp_path) as seen:
            await scale(seen.here, 4)
            await scale(seen.here, 2)
            return await seen.stories(3), seen.metrics, seen.history

    (boot, up, down), metrics, history = virtual_time.run(main())
    assert [s.kind for s in (boot, up, down)] == [Kind.BOOT, Kind.UP, Kind.DOWN]
    assert [p.phase for p in up.phases] == list(phases_of(Kind.UP))
    roles = {p.worker: (p.role, p.rank) for p in up.parts}
    assert roles["slot0"] == (Role.RETAINED, 0)
    assert roles["slot3"] == (Role.JOINER, 3)
    assert {p.worker for p in down.parts if p.role is Role.LEAVER} == {"slot2", "slot3"}
    restored = [s for s in up.steps if s.step == Step.RESTORE]
    assert {s.worker for s in restored} == {"slot2", "slot3"}
    assert {j.tier for j in up.joiners} == {"cold"}
    assert all(up.opened_at_s <= s.began_at_s <= up.ended_at_s for s in up.steps)
    assert not up.troubles
    assert up.phase == Phase.DONE
    # Metrics count what the stories tell.
    assert metrics.value("operations_total", kind="up", outcome="done") == 1
    assert metrics.value("phase_seconds_count", kind="up", phase="restore", outcome="done") == 1
    assert metrics.value("step_seconds_count", step="restore", outcome="done") == 4
    assert metrics.value("joins_total", tier="cold") == 4
    assert metrics.value("ranks") == 2
    assert metrics.value("reports_total", outcome="ok") == 3
    assert metrics.value("operations_running", kind="down") == 0
    # What is kept is what was told, newest first.
    assert history.newest(9) == [down, up, boot]
    assert history.find("last") == down
    assert history.find("up-") == up


def test_an_aborted_operation_tells_what_failed_and_why(tmp_path: Path) -> None:
    async def main() -> tuple[list[Story], CoordinatorMetrics]:
        async with watched(tmp_path) as seen:
            seen.here[3].script = Script({Step.CONNECT: Misbehaviour.FAIL})
            await scale(seen.here, 4)
            return await seen.stories(3), seen.metrics

    (_, aborted, again), metrics = virtual_time.run(main())
    assert (aborted.phase, again.phase) == (Phase.ABORTED, Phase.DONE)
    failed = [p for p in aborted.phases if p.failed]
    assert [p.phase for p in failed] == [Phase.CONNECT]
    assert failed[0].elapsed_s is not None
    (trouble,) = [s for s in aborted.troubles if s.outcome is StepOutcome.FAILED]
    assert (trouble.worker, trouble.step) == ("slot3", Step.CONNECT)
    assert trouble.reason in aborted.failure
    assert metrics.value("phase_seconds_count", kind="up", phase="connect", outcome="failed") == 1
    assert metrics.value("step_seconds_count", step="connect", outcome="failed") == 1
    assert metrics.value("operations_total", kind="up", outcome="aborted") == 1
    page = (tmp_path / "operations" / f"{aborted.operation_id}.html").read_text()
    assert "✕ connect" in page
    assert "2 ranks serve on as before" in page


def test_a_leader_that_takes_over_tells_what_the_one_before_saw(tmp_path: Path) -> None:
    async def main() -> Story:
        async with world(FakeStore(), 4) as here:
            async with Watched(here, tmp_path).running():
                await here.until(CONFIG.initial_ranks, timeout_s=TIMEOUT_S)
                here[2].script = Script({Step.STREAM: Misbehaviour.SILENT})
                here[0].script = Script({Step.STREAM: Misbehaviour.SILENT})
                await request_scale(here.store, here.keys, 4, "test")
                while (now := (await here.status()).operation) is None or now.phase != "stream":
                    await asyncio.sleep(0.05)
            await here.depose()
            async with Watched(here, tmp_path).running() as after:
                return (await after.stories(1))[0]

    story = virtual_time.run(main())
    assert story.phase == Phase.ABORTED
    assert "replaced in phase stream" in story.failure
    # The steps of RESTORE are those that the first leader noted.
    assert {s.worker for s in story.steps if s.step == Step.RESTORE} == {"slot2", "slot3"}
    assert {s.phase for s in story.steps} >= {"plan", "restore", "connect", "aborting"}


def test_tokens_that_shells_saw_come_into_the_report(tmp_path: Path) -> None:
    async def main() -> tuple[Story, CoordinatorMetrics, int]:
        async with watched(tmp_path) as seen:
            await scale(seen.here, 3)
            last = (await seen.here.status()).last
            assert last is not None
            at_s = last.opened_at_s + 0.5 * last.elapsed_s
            for worker in ("slot0", "slot1"):
                gap = Gap(at_s - 0.2, 0.2, worker, "r")
                told = WorkerTraffic(worker, 0.05, int(at_s / 0.05), (3,), (0.2,), (gap,))
                key = seen.here.keys.traffic(last.operation_id, WorkerId(worker))
                await seen.here.store.txn([], [Put(key, encode(told))])
            story = (await seen.stories(2))[1]
            left = await seen.here.store.get_prefix(seen.here.keys.prefix + "traffic/")
            return story, seen.metrics, len(left)

    story, metrics, left = virtual_time.run(main())
    assert [b.tokens for b in story.bins[1]] == [6]
    assert story.longest_gap is not None
    assert story.longest_gap.elapsed_s == 0.2
    assert left == 0
    assert metrics.value("operation_longest_gap_seconds_count", kind="up") == 1


def test_reports_keep_up_with_operations_that_end_faster_than_shells_answer(tmp_path: Path) -> None:
    async def main() -> float:
        async with watched(tmp_path) as seen:
            clock = asyncio.get_running_loop().time
            for ranks in (4, 2) * 5:
                await scale(seen.here, ranks)
            ended_s = clock()
            await seen.stories(11)
            return clock() - ended_s

    assert virtual_time.run(main()) < TRAFFIC_TIMEOUT_S + 1.0


def test_tokens_of_a_newer_shell_cost_their_own_report_alone(tmp_path: Path) -> None:
    async def main() -> list[Story]:
        async with watched(tmp_path) as seen:
            await scale(seen.here, 4)
            last = (await seen.here.status()).last
            assert last is not None
            key = seen.here.keys.traffic(last.operation_id, WorkerId("slot0"))
            await seen.here.store.txn([], [Put(key, b'{"schema_version": 999}')])
            await seen.stories(2)
            await scale(seen.here, 2)
            return await seen.stories(3)

    assert [s.traffic for s in virtual_time.run(main())] == [(), (), ()]


def test_a_timeline_has_a_bound(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(FakeStore(), 4) as here:
            scaler = await here.lead()
            record = await here.scale(scaler, 2)
            path = tmp_path / "timeline.jsonl"
            timeline = Timeline(path, max_bytes=2000)
            for k in range(40):
                begun = Event(EventName.BEGIN, float(k))
                timeline.event(record, begun)
                timeline.event(record, Event(EventName.END, float(k)))
            size = sum(f.stat().st_size for f in tmp_path.iterdir())
            assert size < 2 * 2000 + 600
            found = timeline.events_of(record.operation_id)
            assert found[-1]["ts"] == 39.0
            # A kill in the middle of a line costs that line.
            path.write_text(json.dumps({**found[-1], "ts": 40.0}) + "\n" + '{"ts": 41, "opera')
            assert timeline.events_of(record.operation_id)[-1]["ts"] == 40.0

    virtual_time.run(main())


def test_the_api_serves_what_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched(tmp_path) as seen:
            await scale(seen.here, 4)
            while len(kept := seen.history.names()[::-1]) < 2:
                await asyncio.sleep(0.02)
            config = ApiConfig(port=free_port())
            server = ApiServer(
                seen.here.store,
                seen.here.keys,
                config,
                CONFIG,
                "me",
                token="t",
                history=seen.history,
            )
            await server.start()
            url = f"http://127.0.0.1:{config.port}/v1/operations"
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as session:
                async with session.get(url, params={"limit": "1"}) as answer:
                    listed = await answer.json()
                assert [o["operation_id"] for o in listed["operations"]] == [kept[1]]
                async with session.get(url, params={"limit": "0"}) as answer:
                    assert answer.status == 400
                # The boot is neither under way nor the last one: it comes from the disk.
                async with session.get(f"{url}/{kept[0]}") as answer:
                    boot = await answer.json()
                assert (boot["kind"], boot["done"]) == ("boot", True)
                assert boot["report"] == str(tmp_path / "operations" / f"{kept[0]}.html")
                async with session.get(f"{url}/{kept[1]}/report") as answer:
                    assert answer.content_type == "text/html"
                    assert "script" not in (await answer.text()).lower()
                async with session.get(f"{url}/..%2Fsecret/report") as answer:
                    assert answer.status == 404
            await server.close()

    asyncio.run(main())
