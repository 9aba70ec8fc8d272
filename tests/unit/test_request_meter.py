"""Who is to blame for a request that did not end well."""

from __future__ import annotations

import pytest

from dynamo_elastic.demo.load import Prompt, StreamResult
from dynamo_elastic.testing.request_meter import Meter

PROMPT = Prompt("w1", 1, 4)


def stream(started_s: float, ended_s: float, *, error: str = "", text: str = "t") -> StreamResult:
    return StreamResult(PROMPT, started_s, ended_s=ended_s, error=error, text=text)


def meter() -> Meter:
    it = Meter({PROMPT.key: "t"})
    it.frontend_was_away(10.0, 12.0)
    return it


@pytest.mark.parametrize(
    ("started_s", "ended_s", "counted_as"),
    [
        (8.0, 9.0, "failed"),
        (8.0, 10.5, "cut_off"),
        (10.5, 10.6, "not_accepted"),
        (11.0, 13.0, "not_accepted"),
        (12.1, 12.2, "failed"),
    ],
)
def test_an_error_is_blamed_on_the_kill_only_around_it(
    started_s: float, ended_s: float, counted_as: str
) -> None:
    it = meter()
    it.add([stream(started_s, ended_s, error="no")])
    assert (it.failed, it.cut_off, it.not_accepted) == tuple(
        int(counted_as == name) for name in ("failed", "cut_off", "not_accepted")
    )
    assert it.total == it.failed


def test_what_ends_well_counts_whenever_it_was() -> None:
    it = meter()
    it.add([stream(8.0, 11.0), stream(10.5, 13.0), stream(13.0, 14.0, text="other")])
    assert (it.total, it.failed, it.unequal) == (3, 0, 1)
