"""One operation as one picture: phases, every rank's steps, tokens and gaps, over one time axis."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_elastic.phases import Phase
from dynamo_elastic.report.plots import GAPS_HEIGHT, TOKENS_HEIGHT, gaps, tokens
from dynamo_elastic.report.story import Part, Role, StepOutcome, StepSpan, Story
from dynamo_elastic.report.svg import Scale, line, rect, svg, text, tick_text
from dynamo_elastic.report.words import seconds

MAX_RANKS = 48
"""Rows of ranks in one picture; those that had trouble come first, then those that move."""

COLOURS: dict[str, str] = {
    Phase.PLAN: "#9aa5b1",
    Phase.RESTORE: "#2f6db5",
    Phase.CONNECT: "#2ba6a0",
    Phase.STREAM: "#f08a24",
    Phase.CHECK: "#e3c23c",
    Phase.DRAIN: "#8e5fa8",
    Phase.REDISTRIBUTE: "#d9779f",
    Phase.COMMIT: "#26323f",
    Phase.CANARY: "#3f9142",
    Phase.SERVE: "#8fce7e",
    Phase.REBALANCE: "#94684a",
    Phase.DISCONNECT: "#b9b2a6",
    Phase.PARK: "#8fbfe3",
    Phase.ABORTING: "#b3261e",
}
FAILED = "#d93025"
_LIGHT_TEXT = frozenset(
    {
        Phase.RESTORE,
        Phase.CONNECT,
        Phase.DRAIN,
        Phase.COMMIT,
        Phase.CANARY,
        Phase.REBALANCE,
        Phase.ABORTING,
    }
)

_WIDTH = 1120.0
_LEFT = 150.0
_RIGHT = 24.0
_ROW = 24.0
_BAR = 16.0
_TOP = 30.0
_SPACE = 34.0
_CHAR = 6.4
"""Width of a character of the labels in bars."""


@dataclass(frozen=True, slots=True)
class Window:
    """What the picture shows, in wall-clock seconds."""

    from_s: float
    until_s: float


def whole(story: Story) -> Window:
    """The operation, and a little of what was before and after it."""
    margin = max(0.05, 0.06 * story.elapsed_s)
    return Window(story.opened_at_s - margin, story.ended_at_s + margin)


def around_the_pause(story: Story) -> Window | None:
    """Where serving paused, large; None if nothing paused or it is large already."""
    pause = pause_of(story)
    if pause is None or story.elapsed_s < 1.0:
        return None
    margin = max(0.15, 1.5 * (pause.until_s - pause.from_s))
    window = Window(pause.from_s - margin, pause.until_s + margin)
    return window if window.until_s - window.from_s < 0.6 * story.elapsed_s else None


def pause_of(story: Story) -> Window | None:
    """The longest gap of a client's stream; without tokens, the switch's pause between steps."""
    gap = story.longest_gap
    if gap is not None:
        return Window(gap.began_at_s, gap.ended_at_s)
    switch = story.switch
    if switch is None or not story.switch_gap_s:
        return None
    ended_at_s = switch.began_at_s + switch.elapsed_s
    return Window(ended_at_s - story.switch_gap_s, ended_at_s)


def pause_text(story: Story) -> str:
    """What pause_of() is, in words."""
    gap = story.longest_gap
    if gap is None:
        return f"serving paused {seconds(story.switch_gap_s)} at the switch"
    where = f"on {gap.worker}"
    if gap.moved_from:
        where = f"of a stream that moved from {gap.moved_from} to {gap.worker}"
    phases = [story.phase_at(at_s) for at_s in (gap.began_at_s, gap.ended_at_s)]
    named = [p.upper() for p in dict.fromkeys(phases) if p]
    during = f", in {' to '.join(named)}" if named else ""
    return f"longest gap {seconds(gap.elapsed_s)} {where}{during}"


def shown_parts(story: Story) -> list[Part]:
    """The ranks that have a row, in order of rank, leavers last."""
    troubled = {s.worker for s in story.troubles}

    def weight(part: Part) -> tuple[bool, bool]:
        return part.worker not in troubled, part.role is Role.RETAINED

    kept = sorted(story.parts, key=weight)[:MAX_RANKS]
    return sorted(kept, key=lambda p: (p.role is Role.LEAVER, p.rank if p.rank is not None else 0))


def draw(story: Story, window: Window) -> str:
    """The picture of `window` as SVG."""
    parts = shown_parts(story)
    x = Scale(window.from_s, window.until_s, _LEFT, _WIDTH - _RIGHT)
    gantt_end = _TOP + (1 + len(parts)) * _ROW
    bottom = gantt_end
    below: list[str] = []
    if story.traffic:
        below += tokens(story, x, gantt_end + _SPACE)
        below += gaps(story, x, gantt_end + _SPACE + TOKENS_HEIGHT + _SPACE)
        bottom += 2 * _SPACE + TOKENS_HEIGHT + GAPS_HEIGHT
    body = [*_time_axis(story, x, bottom), *_pause(story, x, bottom)]
    body += _phase_row(story, x)
    for k, part in enumerate(parts):
        body += _rank_row(story, part, x, _TOP + (1 + k) * _ROW)
    height = bottom + 44
    return svg(_WIDTH, height, f"Phases, ranks and tokens of {story.operation_id}", [*body, *below])


def _time_axis(story: Story, x: Scale, bottom: float) -> list[str]:
    since = Scale(x.low - story.opened_at_s, x.high - story.opened_at_s, x.start, x.end)
    ticks = since.ticks(10)
    body = []
    for tick in ticks:
        body.append(line(since(tick), _TOP, since(tick), bottom, "grid"))
        body.append(text(since(tick), bottom + 16, tick_text(tick, ticks), anchor="middle"))
    middle = (x.start + x.end) / 2
    body.append(text(middle, bottom + 34, "seconds since the operation opened", anchor="middle"))
    return body


def _pause(story: Story, x: Scale, bottom: float) -> list[str]:
    pause = pause_of(story)
    if pause is None or pause.until_s < x.low or pause.from_s > x.high:
        return []
    left, right = x(pause.from_s), x(pause.until_s)
    label = pause_text(story)
    width = max(right - left, 2.0)
    half = len(label) * _CHAR / 2
    middle = min(max((left + right) / 2, x.start + half), x.end - half)
    return [
        rect(left, _TOP - 8, width, bottom - _TOP + 8, "#e5484d", tip=label, css="pause"),
        text(middle, _TOP - 14, label, css="pausetext", anchor="middle"),
    ]


def _phase_row(story: Story, x: Scale) -> list[str]:
    body = [text(8, _TOP + _ROW - 8, "operation", css="strong")]
    for span in story.phases:
        elapsed_s = span.elapsed_s
        until_s = story.ended_at_s if elapsed_s is None else span.began_at_s + elapsed_s
        took = "under way" if elapsed_s is None else seconds(elapsed_s)
        tip = f"{span.phase.upper()}: {took}{', failed' if span.failed else ''}"
        name = _Name(span.phase, span.phase, tip)
        body += _bar(name, Window(span.began_at_s, until_s), x, _TOP, failed=span.failed)
    return body


def _rank_row(story: Story, part: Part, x: Scale, y: float) -> list[str]:
    rank = f"rank {part.rank}" if part.rank is not None else ""
    role = "" if part.role is Role.RETAINED else f" {part.role}"
    body = [
        text(8, y + _ROW - 8, f"{rank} {part.worker}", css="label"),
        text(_LEFT - 6, y + _ROW - 8, role, css=f"role {part.role}", anchor="end"),
    ]
    for span in story.steps:
        if span.worker == part.worker:
            until_s, name = (
                span.began_at_s + span.elapsed_s,
                _Name(span.phase, span.step, _tip(span)),
            )
            failed = span.outcome is not StepOutcome.DONE
            body += _bar(name, Window(span.began_at_s, until_s), x, y, failed=failed)
    return body


def _tip(span: StepSpan) -> str:
    lines = [f"{span.worker}: {span.step} {span.outcome}, {seconds(span.elapsed_s)}"]
    lines += [span.reason] if span.reason else []
    lines += [f"{k}: {v}" for k, v in span.facts.items() if isinstance(v, str | int | float) and v]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Name:
    """What a bar is called, and what it tells who points at it."""

    phase: str
    label: str
    tip: str


def _bar(name: _Name, span: Window, x: Scale, y: float, *, failed: bool) -> list[str]:
    if span.until_s < x.low or span.from_s > x.high:
        return []
    left = x(span.from_s)
    width = max(x(span.until_s) - left, 1.5)
    colour = FAILED if failed else COLOURS.get(name.phase, "#888888")
    body = [rect(left, y + (_ROW - _BAR) / 2, width, _BAR, colour, tip=name.tip)]
    label = f"✕ {name.label}" if failed else name.label
    if width > len(label) * _CHAR + 6:
        light = failed or name.phase in _LIGHT_TEXT
        css = "inbar light" if light else "inbar"
        body.append(text(left + width / 2, y + _ROW - 8, label, css=css, anchor="middle"))
    elif failed:
        body.append(text(left + width + 3, y + _ROW - 8, label, css="failedtext"))
    return body
