"""The report of one operation: one HTML file that needs nothing else and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from dynamo_elastic.phases import Phase
from dynamo_elastic.report.chart import (
    COLOURS,
    FAILED,
    MAX_RANKS,
    Window,
    around_the_pause,
    draw,
    pause_text,
    whole,
)
from dynamo_elastic.report.plots import GAPS, TOKENS
from dynamo_elastic.report.story import StepOutcome, Story
from dynamo_elastic.report.style import STYLE
from dynamo_elastic.report.words import rate, seconds, size, time_of_day

_MAX_ROWS = 400


def page(story: Story) -> str:
    """The report of `story`. Deterministic; no script, no picture and no style from elsewhere."""
    title = f"{story.title}: {_outcome(story)}"
    body = [
        _head(story),
        _tiles(story),
        _why(story),
        "<h2>What happened when</h2>",
        _figure(story, whole(story)),
        _legend(story),
        _closer(story),
        _links(story),
        _joiners(story),
        _phases(story),
        _steps(story),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _outcome(story: Story) -> str:
    return story.phase if story.over else f"in {story.phase}"


def _head(story: Story) -> str:
    css = {Phase.DONE: "done", Phase.ABORTED: "aborted"}.get(Phase(story.phase), "going")
    asked = f"asked by {story.source}" + (f" ({story.request_id})" if story.request_id else "")
    return (
        f'<h1>{escape(story.title)}<span class="badge {css}">{escape(_outcome(story))}</span></h1>'
        f'<p class="sub">{escape(story.deployment)} · operation {escape(story.operation_id)} · '
        f"epoch {story.epoch} · {escape(asked)} · opened {time_of_day(story.opened_at_s)}</p>"
    )


def _tiles(story: Story) -> str:
    tiles = [("whole operation", seconds(story.elapsed_s), False)]
    longest = story.longest_gap
    for name, moved in (("stayed", False), ("moved", True)):
        gap = story.longest_gap_of(moved)
        if gap is not None:
            what = f"longest gap of a stream that {name}"
            tiles.append((what, seconds(gap.elapsed_s), gap is longest))
    if story.switch is not None:
        paused = seconds(story.switch_gap_s)
        tiles.append(("pause between steps at the switch", paused, longest is None))
    if story.moved_bytes:
        tiles.append(("weights moved", size(story.moved_bytes), False))
    if story.joiners:
        tiers = ", ".join(sorted({j.tier for j in story.joiners}))
        slowest_s = max(j.ready_s for j in story.joiners)
        tiles.append((f"slowest joiner ready, from {tiers}", seconds(slowest_s), False))
    if story.requests_moved:
        tiles.append(("requests moved to other ranks", str(story.requests_moved), False))
    shown = "".join(
        f'<div class="tile{" hot" if hot else ""}"><b>{escape(value)}</b>'
        f"<span>{escape(name)}</span></div>"
        for name, value, hot in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _why(story: Story) -> str:
    """What failed, and why; '' if nothing did."""
    lines = [f"<p><b>{escape(story.failure)}</b></p>"] if story.failure else []
    if story.phase == Phase.ABORTED:
        kept = f"Nothing was changed: {story.ranks_before} ranks serve on as before."
        lines.append(f"<p>{kept}</p>" if story.ranks_before else "")
    lines += [f"<p>lost: {escape(worker)}</p>" for worker in story.lost]
    lines += [
        f"<p>{escape(s.worker)}, {escape(s.step)}: {escape(s.outcome)}"
        f"{escape(': ' + s.reason) if s.reason else ''}</p>"
        for s in story.troubles[:12]
    ]
    more = len(story.troubles) - 12
    lines += [f"<p>and {more} more, in the table of steps</p>"] if more > 0 else []
    return f'<div class="why">{"".join(lines)}</div>' if lines else ""


def _figure(story: Story, window: Window) -> str:
    return f"<figure style='margin:0'>{draw(story, window)}</figure>"


def _legend(story: Story) -> str:
    entries = [(COLOURS.get(p.phase, "#888888"), p.phase) for p in story.phases]
    if story.troubles or any(p.failed for p in story.phases):
        entries.append((FAILED, "failed, lost or silent"))
    entries.append(("#f7c5c7", "longest gap" if story.gaps else "pause at the switch"))
    if story.traffic:
        entries += [(TOKENS, "tokens"), (GAPS, "gaps")]
    shown = "".join(f'<span><i style="background:{c}"></i>{escape(n)}</span>' for c, n in entries)
    notes = []
    if len(story.parts) > MAX_RANKS:
        notes.append(f"{MAX_RANKS} of {len(story.parts)} ranks are drawn, troubled ones first.")
    if not story.traffic:
        notes.append("No tokens were seen by the worker shells around this operation.")
    note = f'<p class="note">{escape(" ".join(notes))}</p>' if notes else ""
    return f'<div class="legend">{shown}</div>{note}'


def _closer(story: Story) -> str:
    window = around_the_pause(story)
    if window is None:
        return ""
    return f"<h2>Closer: {escape(pause_text(story))}</h2>{_figure(story, window)}"


def _links(story: Story) -> str:
    if not story.links:
        return ""
    most = max(link.size_bytes for link in story.links)
    rows = [
        (
            link.source,
            link.target,
            link.step,
            f'<span class="meter" style="width:{140 * link.size_bytes / most:.0f}px"></span>',
            size(link.size_bytes),
            seconds(link.elapsed_s),
            rate(link.size_bytes, link.elapsed_s),
        )
        for link in story.links[:_MAX_ROWS]
    ]
    head = ("from", "to", "step", "", "bytes", "time", "rate")
    body = _table(head, rows, numbers=(4, 5, 6), raw=(3,))
    note = '<p class="note">The time is the source\'s for all of its targets.</p>'
    return f'<h2>Bytes per link</h2><div id="links">{body}</div>{note}'


def _joiners(story: Story) -> str:
    if not story.joiners:
        return ""
    rows = [
        (j.worker, j.tier, seconds(j.ready_s), "; ".join(j.fell_through) or "best tier")
        for j in story.joiners[:_MAX_ROWS]
    ]
    body = _table(("joiner", "from", "ready in", "why not from a better tier"), rows, numbers=(2,))
    return f'<h2>Where joiners came from</h2><div id="joiners">{body}</div>'


def _phases(story: Story) -> str:
    rows = [
        (
            p.phase.upper(),
            f"{p.began_at_s - story.opened_at_s:.3f}",
            "under way" if p.elapsed_s is None else f"{p.elapsed_s:.3f}",
            "failed" if p.failed else "",
        )
        for p in story.phases
    ]
    bad = [k for k, p in enumerate(story.phases) if p.failed]
    body = _table(("phase", "began, s", "took, s", ""), rows, numbers=(1, 2), bad=bad)
    return f'<h2>Phases</h2><div id="phases">{body}</div>'


def _steps(story: Story) -> str:
    if not story.steps:
        return ""
    order = sorted(story.steps, key=lambda s: (s.outcome is StepOutcome.DONE, s.began_at_s))
    rows = [
        (
            s.worker,
            s.phase.upper(),
            s.step,
            f"{s.began_at_s - story.opened_at_s:.3f}",
            f"{s.elapsed_s:.3f}",
            s.outcome,
            s.reason,
        )
        for s in order[:_MAX_ROWS]
    ]
    bad = [k for k, s in enumerate(order[:_MAX_ROWS]) if s.outcome is not StepOutcome.DONE]
    head = ("worker", "phase", "step", "began, s", "took, s", "outcome", "why")
    more = len(order) - _MAX_ROWS
    note = f'<p class="note">and {more} more, in the JSON beside this file</p>' if more > 0 else ""
    body = _table(head, rows, numbers=(3, 4), bad=bad)
    return (
        f"<details><summary>Every step of every rank ({len(order)})</summary>"
        f'<div id="steps">{body}</div>{note}</details>'
    )


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    bad: Sequence[int] = (),
    raw: Sequence[int] = (),
) -> str:
    """Cells are escaped, but those of the columns `raw`."""

    def cell(tag: str, k: int, what: str) -> str:
        css = ' class="n"' if k in numbers else ""
        return f"<{tag}{css}>{what if k in raw else escape(what)}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", k, h) for k, h in enumerate(head)) + "</tr>"]
    for at, row in enumerate(rows):
        css = ' class="bad"' if at in bad else ""
        lines.append(f"<tr{css}>" + "".join(cell("td", k, c) for k, c in enumerate(row)) + "</tr>")
    return "<table>" + "".join(lines) + "</table>"
