"""Our own plain drawing of a Grafana dashboard, from what a real Prometheus answers."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from dynamo_elastic.report.svg import Scale, line, rect, svg, text, tick_text
from dynamo_elastic.report.words import seconds, size
from dynamo_elastic.testing.prometheus import Prometheus, Series

_COLOURS = ("#2f6db5", "#f08a24", "#3f9142", "#8e5fa8", "#2ba6a0", "#d9779f", "#94684a", "#9aa5b1")
_COLUMN_PX, _ROW_PX = 50, 36
_STYLE = """body{font:13px system-ui,"DejaVu Sans",sans-serif;background:#f4f6f8;margin:0;
color:#1c2733}
h1{font-size:19px;margin:12px 14px 2px} .sub{margin:0 14px 6px;color:#5b6875}
.board{position:relative;width:1200px} .panel{position:absolute;background:#fff;border:1px solid
#d8dee5;border-radius:4px;box-sizing:border-box;padding:6px 8px;overflow:hidden}
.row{position:absolute;font-weight:700;font-size:15px;padding:9px 12px}
.panel b{font-size:12.5px} .value{font-size:34px;text-align:center;margin-top:18px;color:#2e7d32}
svg text{font-size:10.5px;fill:#5b6875} svg .grid{stroke:#e4e9ee} svg .axis{stroke:#9aa5b1}
.key{font-size:11px} .key i{display:inline-block;width:10px;height:10px;border-radius:2px;
margin:0 4px 0 9px}"""


def draw_dashboard(board: Path, source: Prometheus, since_s: float, until_s: float) -> str:
    """The dashboard's panels in their places, as HTML. A plain drawing: not what Grafana draws."""
    panels = json.loads(board.read_text())["panels"]
    bottom = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    drawn = "\n".join(_panel(p, source, since_s, until_s) for p in panels)
    sub = f"{until_s - since_s:.0f} s of a real deployment, scraped by Prometheus"
    return (
        f'<!doctype html><html><head><meta charset="utf-8"><style>{_STYLE}</style></head><body>'
        f"<h1>dynamo_elastic</h1><p class='sub'>{sub}</p>"
        f'<div class="board" style="height:{bottom * _ROW_PX}px">{drawn}</div></body></html>'
    )


def _panel(panel: dict[str, Any], source: Prometheus, since_s: float, until_s: float) -> str:
    at = panel["gridPos"]
    x, y = at["x"] * _COLUMN_PX + 4, at["y"] * _ROW_PX
    wide, high = at["w"] * _COLUMN_PX - 8, at["h"] * _ROW_PX - 8
    place = f"left:{x}px;top:{y}px;width:{wide}px;height:{high}px"
    title = escape(panel["title"])
    if panel["type"] == "row":
        return f'<div class="row" style="left:{x}px;top:{y}px">{title}</div>'
    found = [
        s
        for target in panel["targets"]
        for s in source.series(target["expr"], target["legendFormat"], since_s, until_s)
    ]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] == "stat":
        value = _shown(found[0].points[-1][1], unit) if found else "no data"
        inner = f'<div class="value">{value}</div>'
    else:
        custom = panel["fieldConfig"]["defaults"]["custom"]
        stacked = "stacking" in custom
        window = (since_s, until_s)
        inner = _graph(found, unit, window, (wide - 16, high - 44), stacked=stacked) + _key(found)
    return f'<div class="panel" style="{place}"><b>{title}</b>{inner}</div>'


def _key(found: list[Series]) -> str:
    shown = "".join(
        f'<i style="background:{_COLOURS[k % len(_COLOURS)]}"></i>{escape(s.name)}'
        for k, s in enumerate(found[:8])
    )
    return f'<div class="key">{shown or "no data in this time"}</div>'


def _graph(
    found: list[Series],
    unit: str,
    window: tuple[float, float],
    room: tuple[float, float],
    *,
    stacked: bool,
) -> str:
    wide, high = room
    x = Scale(0.0, window[1] - window[0], 62, wide - 4)
    sums: dict[float, float] = {}
    for series in found:
        for at, value in series.points:
            sums[at] = sums.get(at, 0.0) + value if stacked else max(sums.get(at, 0.0), value)
    y = Scale(0.0, max(sums.values(), default=0.0) * 1.1 or 1.0, high - 20, 6)
    body = [line(x.start, y.start, x.end, y.start, "axis")]
    for tick in y.ticks(3):
        body.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        body.append(text(x.start - 5, y(tick) + 4, _shown(tick, unit), anchor="end"))
    ticks = x.ticks(5)
    for tick in ticks:
        body.append(text(x(tick), high - 5, f"{tick_text(tick, ticks)} s", anchor="middle"))
    base: dict[float, float] = {}
    for k, series in enumerate(found):
        colour = _COLOURS[k % len(_COLOURS)]
        if stacked:
            body += _bars(series, base, x, y, window[0], colour)
        else:
            points = " ".join(f"{x(t - window[0]):.1f},{y(v):.1f}" for t, v in series.points)
            body.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
    return svg(wide, high, "panel", body)


def _bars(
    series: Series, base: dict[float, float], x: Scale, y: Scale, since_s: float, colour: str
) -> list[str]:
    body = []
    for at, value in series.points:
        low = base.get(at, 0.0)
        base[at] = low + value
        top = y(low + value)
        body.append(rect(x(at - since_s), top, 3, y(low) - top, colour))
    return body


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value)
    if unit in ("bytes", "Bps"):
        return size(value) + ("/s" if unit == "Bps" else "")
    return f"{value:.3g}"
