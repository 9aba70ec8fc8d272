"""The little of SVG that charts need: a linear scale with round ticks, marks, and text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Values `low`..`high` on pixels `start`..`end`; values beyond are drawn at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About `count` round values inside."""
        raw = (self.high - self.low) / max(1, count)
        if raw <= 0:
            return [self.low]
        power = 10 ** math.floor(math.log10(raw))
        step = next(power * r for r in _ROUND if power * r >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def tick_text(value: float, ticks: list[float]) -> str:
    """`value` with the digits that tell `ticks` apart."""
    step = min((b - a for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if digits and round(step, digits) != step:
        digits += 1
    return f"{value + 0.0:.{digits}f}"


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, tip: str = "", css: str = ""
) -> str:
    """A filled rectangle; `tip` is shown by a pointer that rests on it."""
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    cls = f' class="{css}"' if css else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{height:.1f}" '
        f'fill="{fill}"{cls}>{inner}</rect>'
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def text(x: float, y: float, what: str, *, css: str = "", anchor: str = "start") -> str:
    cls = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{cls}>{escape(what)}</text>'


def area(points: list[tuple[float, float]], base: float, css: str) -> str:
    """The area between `points` and the height `base`."""
    if not points:
        return ""
    path = " ".join(f"L{x:.1f},{y:.1f}" for x, y in points)
    first, last = points[0][0], points[-1][0]
    return f'<path d="M{first:.1f},{base:.1f} {path} L{last:.1f},{base:.1f}Z" class="{css}"/>'


def svg(width: float, height: float, label: str, body: list[str]) -> str:
    """The picture; `label` is for who can't see it."""
    inner = "\n".join(body)
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg">\n{inner}\n</svg>'
    )
