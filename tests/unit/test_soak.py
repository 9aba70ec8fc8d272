"""How a soak counts what its clients saw."""

from __future__ import annotations

from pathlib import Path

from dynamo_elastic.agent.records import ENGINE_LOG
from dynamo_elastic.demo.load import Prompt, StreamResult
from dynamo_elastic.engine.reference.loop import MOVED_REQUESTS
from dynamo_elastic.testing.cycles import Footprint, MovedRequests
from dynamo_elastic.testing.deployments import deployment
from dynamo_elastic.testing.soak import Tally, marked

PROMPT = Prompt("amber", 1, 8)


def stream(
    request_id: str, *token_times_s: float, text: str = "same", error: str = ""
) -> StreamResult:
    return StreamResult(PROMPT, 0.0, request_id, 0.0, text, list(token_times_s), error)


def tally() -> Tally:
    return Tally({PROMPT.key: "same"})


def test_a_moved_stream_has_a_gap_of_its_own() -> None:
    counted = tally()
    counted.add([stream("a", 0.0, 0.1)], {"b"})
    counted.add([stream("b", 0.0, 0.1, 0.6), stream("c", 1.0, 1.2)], set())
    assert (counted.requests, counted.moved) == (3, 1)
    assert counted.gap_max_s == 1.2 - 1.0
    assert counted.moved_gap_max_s == 0.5


def test_a_stream_that_failed_has_no_gap_and_another_text_is_seen() -> None:
    counted = tally()
    counted.add([stream("a", 0.0, 9.0, error="HTTP 503"), stream("b", 0.0, text="other")], {"a"})
    assert (counted.requests, counted.failed, counted.unequal) == (2, 1, 1)
    assert counted.errors == {"HTTP 503"}
    assert counted.moved_gap_max_s == 0


def test_the_log_of_an_engine_tells_who_moved(tmp_path: Path) -> None:
    config = deployment(tmp_path)
    moved = MovedRequests(config)
    assert moved.new() == set()
    log = config.control_dir(1) / ENGINE_LOG
    log.parent.mkdir(parents=True)
    log.write_text(
        f"12:00 INFO loop: {MOVED_REQUESTS} uuid-a/3 uuid-b/10\n12:01 INFO loop: other/1\n"
    )
    assert moved.new() == {"uuid-a", "uuid-b"}
    with log.open("a") as file:
        file.write(f"12:02 INFO loop: {MOVED_REQUESTS} uuid-c/0\n")
    assert moved.new() == {"uuid-c"}
    assert moved.new() == set()


def test_slots_that_serve_and_slots_that_are_parked_are_not_one_line() -> None:
    one = Footprint(1, 2, 3)
    held = {"engine0:10": one, "slot0:11": one, "engine1:12": one, "coordinator:13": one}
    assert set(marked(held, {0})) == {
        "engine0_idle:10",
        "slot0_idle:11",
        "engine1:12",
        "coordinator:13",
    }
