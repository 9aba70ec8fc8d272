"""The page and the chart of an operation say what its story says, and run nothing."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dynamo_elastic.phases import TERMINAL, Phase
from dynamo_elastic.report.chart import COLOURS, MAX_RANKS, draw, shown_parts, whole
from dynamo_elastic.report.gantt import LETTERS, gantt
from dynamo_elastic.report.history import History, NoSuchOperation
from dynamo_elastic.report.page import page
from dynamo_elastic.report.story import (
    Part,
    Role,
    Story,
    StoryError,
    decode_story,
    encode_story,
)
from dynamo_elastic.report.svg import Scale, tick_text
from dynamo_elastic.testing.pages import PageReader, bar_faults, number_faults
from dynamo_elastic.testing.stories import OPENED_AT_S, grown, undone


@pytest.mark.parametrize("story", [grown(), undone()], ids=["grown", "undone"])
def test_what_the_page_shows_is_the_story(story: Story) -> None:
    html = page(story)
    assert number_faults(story, html) == []
    assert bar_faults(story, html) == []


def test_a_page_that_says_something_else_would_be_seen() -> None:
    story = grown()
    slower = replace(story, elapsed_s=2.5, phases=(replace(story.phases[0], elapsed_s=0.5),))
    assert "phases" in " ".join(number_faults(story, page(slower)))
    assert "whole operation" in " ".join(number_faults(story, page(slower)))
    assert bar_faults(story, page(slower)) != []


def test_the_page_runs_and_loads_nothing() -> None:
    read = PageReader(page(grown()))
    assert not read.tags & {"script", "iframe", "object", "embed", "link", "img", "form"}
    assert read.foreign == []


def test_what_failed_and_why_is_the_first_thing_said() -> None:
    story = undone("<script>alert(1)</script> & more")
    html = page(story)
    assert "<script>" not in html
    why = html[html.index('<div class="why">') : html.index("What happened when")]
    assert "slot3 failed check: &lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in why
    assert "2 ranks serve on as before" in why
    assert "✕ check" in html


def test_the_pause_is_named_and_drawn() -> None:
    story = grown(gap_s=0.25)
    html = page(story)
    assert "longest gap 250 ms on slot1, in STREAM to COMMIT" in html
    assert html.count('class="pause"') == 2  # in the whole picture and in the closer one
    silent = page(replace(story, traffic=()))
    assert "serving paused 40 ms at the switch" in silent
    assert "No tokens were seen" in silent


def test_a_thousand_ranks_fit_on_a_page() -> None:
    story = undone()
    many = [Part(f"slot{k}", Role.RETAINED, k) for k in range(4, 1024)]
    wide = replace(story, parts=(*story.parts, *many))
    shown = shown_parts(wide)
    assert len(shown) == MAX_RANKS
    assert "slot3" in {p.worker for p in shown}  # the one that failed
    assert f"{MAX_RANKS} of 1024 ranks are drawn" in page(wide)
    assert len(draw(wide, whole(wide))) < 60_000


def test_stories_are_kept_up_to_a_number(tmp_path: Path) -> None:
    history = History(tmp_path / "ops", keep=2)
    for k in range(4):
        history.save(replace(grown(), operation_id=f"up-{k}-x"))
    assert history.names() == ["up-3-x", "up-2-x"]
    # Of an older one more has become known: it is no newer for that.
    history.save(replace(grown(), operation_id="up-2-x"))
    assert history.names() == ["up-3-x", "up-2-x"]
    assert {p.name for p in (tmp_path / "ops").iterdir()} == {
        "up-2-x.json",
        "up-2-x.html",
        "up-3-x.json",
        "up-3-x.html",
    }
    assert history.find("last").operation_id == "up-3-x"
    assert history.find("up-2").operation_id == "up-2-x"
    with pytest.raises(NoSuchOperation, match="several operations 'up'"):
        history.find("up")
    with pytest.raises(NoSuchOperation, match="kept are: up-3-x, up-2-x"):
        history.find("down")
    with pytest.raises(NoSuchOperation, match="not the name"):
        history.load("../secret")
    (tmp_path / "ops" / "up-2-x.json").write_text("{")
    with pytest.raises(StoryError, match=r"up-2-x\.json: not a story"):
        history.load("up-2-x")
    assert [s.operation_id for s in history.newest(5)] == ["up-3-x"]


def test_a_story_is_read_as_it_was_written() -> None:
    for story in (grown(), undone()):
        assert decode_story(encode_story(story)) == story
    with pytest.raises(StoryError, match="schema version 9"):
        decode_story(b'{"schema_version": 9, "story": {}}')


@given(low=st.floats(-1e4, 1e4), span=st.floats(1e-3, 1e4), count=st.integers(1, 20))
def test_ticks_are_inside_and_told_apart(low: float, span: float, count: int) -> None:
    scale = Scale(low, low + span, 0.0, 100.0)
    ticks = scale.ticks(count)
    assert len(ticks) <= 2 * count + 2
    slack = span * 1e-6
    assert all(low - slack <= t <= low + span + slack for t in ticks)
    shown = [tick_text(t, ticks) for t in ticks]
    assert len(set(shown)) == len(shown)


def test_the_times_of_the_sample_are_what_tests_say() -> None:
    story = grown()
    assert story.opened_at_s == OPENED_AT_S
    assert story.phase_at(story.longest_gap.ended_at_s if story.longest_gap else 0) == "commit"


def test_every_phase_has_a_colour_and_a_letter() -> None:
    drawn = set(Phase) - TERMINAL
    assert set(COLOURS) == set(LETTERS) == drawn
    assert len({*COLOURS.values()}) == len({*LETTERS.values()}) == len(drawn)


def test_an_operation_under_way_can_be_told() -> None:
    story = grown()
    until = [p.phase for p in story.phases].index(Phase.CHECK)
    now = replace(story.phases[until], elapsed_s=None)
    running = replace(
        story, phase=Phase.CHECK, phases=(*story.phases[:until], now), elapsed_s=1.05, traffic=()
    )
    assert "under way" in page(running)
    out = io.StringIO()
    Console(file=out, width=100).print(gantt(running, 100))
    text = out.getvalue()
    assert "up 2 → 4 ranks: check in 1.05 s" in text
    assert re.search(r"k +check +990 ms +under way", text)
    assert all(len(row) <= 100 for row in text.splitlines())


def test_a_terminal_shows_who_failed_without_colours() -> None:
    out = io.StringIO()
    Console(file=out, width=90).print(gantt(undone("too slow"), 90))
    rows = {line.split()[1]: line for line in out.getvalue().splitlines() if "rank" in line}
    assert "✕" in rows["3"]
    assert "✕" not in rows["2"]
    assert "slot3, check: failed: too slow" in out.getvalue()
