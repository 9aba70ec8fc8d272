"""Reads a report back, and says where it does not say what the story says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from dynamo_elastic.report.chart import whole
from dynamo_elastic.report.story import Link, StepSpan, Story
from dynamo_elastic.report.words import rate, seconds, size

_LEFT_PX, _RIGHT_PX = 150, 1120 - 24
"""Where the time axis of the picture begins and ends."""


class PageReader(HTMLParser):
    """Tables by the id of the div around them, and what a page loads or runs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: set[str] = set()
        self.foreign: list[str] = []
        self._table: list[list[str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = dict(attrs)
        self.foreign += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "data")]
        self.foreign += [k for k in given if k.startswith("on")]
        if tag == "div" and given.get("id"):
            self._table = self.tables[str(given["id"])] = []
        if tag == "tr":
            self._table.append([])
        if tag in ("td", "th") and self._table:
            self._table[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._table = []

    def handle_data(self, data: str) -> None:
        if self._table and self._table[-1]:
            self._table[-1][-1] += data

    def rows(self, name: str) -> list[list[str]]:
        """Without the head; [] if there is no such table."""
        return self.tables.get(name, [])[1:]


def number_faults(story: Story, html: str) -> list[str]:
    """What tables and tiles of the page say, where that is not what the story says."""
    read = PageReader(html)
    shown: dict[str, Any] = {
        "phases": [row[:3] for row in read.rows("phases")],
        "links": [[*row[:3], *row[4:]] for row in read.rows("links")],
        "joiners": [row[:3] for row in read.rows("joiners")],
        "steps": sorted(read.rows("steps")),
    }
    opened_at_s = story.opened_at_s
    told: dict[str, Any] = {
        "phases": [
            [p.phase.upper(), f"{p.began_at_s - opened_at_s:.3f}", f"{p.elapsed_s or 0:.3f}"]
            for p in story.phases
        ],
        "links": [_link_row(link) for link in story.links],
        "joiners": [[j.worker, j.tier, seconds(j.ready_s)] for j in story.joiners],
        "steps": sorted(_step_row(step, opened_at_s) for step in story.steps),
    }
    tiles = re.findall(r'<div class="tile[^"]*"><b>([^<]*)</b><span>([^<]*)</span>', html)
    shown |= {name: value for value, name in tiles}
    stayed, moved = story.longest_gap_of(False), story.longest_gap_of(True)
    told |= {
        "whole operation": seconds(story.elapsed_s),
        "longest gap of a stream that stayed": seconds(stayed.elapsed_s) if stayed else None,
        "longest gap of a stream that moved": seconds(moved.elapsed_s) if moved else None,
        "weights moved": size(story.moved_bytes) if story.moved_bytes else None,
    }
    return [
        f"{name}: the page has {shown.get(name)}, the story {value}"
        for name, value in told.items()
        if shown.get(name) != value
    ]


def _link_row(link: Link) -> list[str]:
    size_bytes, elapsed_s = link.size_bytes, link.elapsed_s
    numbers = [size(size_bytes), seconds(elapsed_s), rate(size_bytes, elapsed_s)]
    return [link.source, link.target, link.step, *numbers]


def _step_row(step: StepSpan, opened_at_s: float) -> list[str]:
    when = [f"{step.began_at_s - opened_at_s:.3f}", f"{step.elapsed_s:.3f}"]
    return [step.worker, step.phase.upper(), step.step, *when, step.outcome, step.reason]


def bar_faults(story: Story, html: str) -> list[str]:
    """Phases whose bar in the first picture does not lie where the phase was, to a pixel."""
    picture = html.split("<svg")[1].split("</svg>")[0]
    pattern = r'<rect x="([\d.]+)"[^>]*? width="([\d.]+)"[^>]*><title>([A-Z]+): '
    bars = {tip: (float(x), float(width)) for x, width, tip in re.findall(pattern, picture)}
    window = whole(story)
    pixels_per_s = (_RIGHT_PX - _LEFT_PX) / (window.until_s - window.from_s)
    found = []
    for span in story.phases:
        left = _LEFT_PX + (span.began_at_s - window.from_s) * pixels_per_s
        width = max(1.5, (span.elapsed_s or 0.0) * pixels_per_s)
        there = bars.get(span.phase.upper())
        if there is None or abs(there[0] - left) > 1 or abs(there[1] - width) > 1:
            found.append(f"{span.phase}: the bar is at {there}, not at ({left:.1f}, {width:.1f})")
    return found
