"""Log lines, for people or as JSON, carry operation, epoch, phase and rank where they are known."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from dynamo_elastic.logs import (
    JsonFormatter,
    TextFormatter,
    change_log_fields,
    configure,
    log_fields,
)


@pytest.fixture
def lines() -> Iterator[tuple[logging.Logger, io.StringIO, logging.StreamHandler[io.StringIO]]]:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    log = logging.getLogger("dynamo_elastic.test")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield log, out, handler
    log.removeHandler(handler)


def test_json_lines_carry_what_was_said_around_them(
    lines: tuple[logging.Logger, io.StringIO, logging.StreamHandler[io.StringIO]],
) -> None:
    log, out, _ = lines
    log.info("before %d", 1)
    with log_fields(operation_id="up-2", epoch=2):
        change_log_fields(phase="restore")
        log.info("inside", extra={"rank": 3})
        try:
            raise ValueError("boom")
        except ValueError:
            log.exception("failed")
    log.info("after")
    before, inside, failed, after = (json.loads(line) for line in out.getvalue().splitlines())
    assert before["message"] == "before 1"
    assert before.keys() == after.keys() == {"time", "level", "logger", "message"}
    assert (inside["operation_id"], inside["epoch"], inside["phase"]) == ("up-2", 2, "restore")
    assert inside["rank"] == 3
    assert "rank" not in failed
    assert "ValueError: boom" in failed["exception"]


def test_fields_follow_a_task_and_stay_in_it(
    lines: tuple[logging.Logger, io.StringIO, logging.StreamHandler[io.StringIO]],
) -> None:
    log, out, handler = lines
    handler.setFormatter(TextFormatter())

    async def step(name: str) -> None:
        with log_fields(phase=name):
            await asyncio.sleep(0)
            log.info("in %s", name)

    async def main() -> None:
        with log_fields(operation_id="up-2"):
            await asyncio.gather(step("stream"), step("check"))
        log.info("idle")

    asyncio.run(main())
    text = out.getvalue().splitlines()
    assert text[0].endswith("dynamo_elastic.test: in stream [operation_id=up-2 phase=stream]")
    assert text[1].endswith("in check [operation_id=up-2 phase=check]")
    assert text[2].endswith("dynamo_elastic.test: idle")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_configure_takes_the_place_of_what_was(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure("text")
        configure(log_format)
        logging.getLogger("dynamo_elastic.x").info("once")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("{") == (log_format == "json")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
