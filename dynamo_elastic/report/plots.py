"""Tokens and gaps over the time axis of an operation's picture."""

from __future__ import annotations

from dynamo_elastic.report.story import Story
from dynamo_elastic.report.svg import Scale, area, line, rect, text, tick_text
from dynamo_elastic.report.words import seconds

TOKENS_HEIGHT = 110.0
GAPS_HEIGHT = 80.0
TOKENS = "#4f9dd9"
GAPS = "#7a4fbf"


def tokens(story: Story, x: Scale, top: float) -> list[str]:
    width_s, bins = story.bins
    bottom = top + TOKENS_HEIGHT
    rates = [(b.began_at_s, b.tokens / width_s) for b in bins]
    y = Scale(0.0, max((r for _, r in rates), default=1.0) * 1.1 or 1.0, bottom, top)
    points = []
    for at_s, rate in rates:
        if at_s + width_s >= x.low and at_s <= x.high:
            points += [(x(at_s), y(rate)), (x(at_s + width_s), y(rate))]
    unit = f"tokens/s of all streams, in bins of {width_s * 1e3:.0f} ms"
    return [*_value_axis(y, x, 4, unit), area(points, bottom, "tokens")]


def gaps(story: Story, x: Scale, top: float) -> list[str]:
    width_s, bins = story.bins
    bottom = top + GAPS_HEIGHT
    moved = [g for g in story.gaps if g.moved_from]
    values = [(b.began_at_s, b.gap_s) for b in bins]
    values += [(g.ended_at_s, g.elapsed_s) for g in moved]
    y = Scale(0.0, max((g for _, g in values), default=0.0) * 1.15e3 or 1.0, bottom, top)
    unit = "longest wait for a next token, ms (of any stream, by when it ended)"
    body = _value_axis(y, x, 4, unit)
    for at_s, gap_s in values:
        if gap_s and at_s + width_s >= x.low and at_s <= x.high:
            height = bottom - y(gap_s * 1e3)
            wide = max(1.5, x(at_s + width_s) - x(at_s) - 1)
            tip = f"{seconds(gap_s)} at {at_s - story.opened_at_s:.2f} s"
            body.append(rect(x(at_s), bottom - height, wide, height, GAPS, tip=tip))
    return body


def _value_axis(y: Scale, x: Scale, count: int, what: str) -> list[str]:
    ticks = y.ticks(count)
    body = [text(x.start, y.end - 8, what, css="axisname")]
    for tick in ticks:
        body.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        body.append(text(x.start - 6, y(tick) + 4, tick_text(tick, ticks), anchor="end"))
    return body
