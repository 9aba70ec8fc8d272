"""Dashboard and alerts ask for what the processes count. A real deployment's scrape is
compared in tests/integration/test_observe.py."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamo_elastic.metrics import KINDS
from dynamo_elastic.testing.promql import (
    Query,
    dashboard_queries,
    faults,
    rule_queries,
    selectors,
)

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dynamo-elastic.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"


def described() -> dict[str, frozenset[str]]:
    """Sample name -> labels, as the code says."""
    series: dict[str, frozenset[str]] = {}
    for metric in (m for kind in KINDS for m in kind().described()):
        labels = frozenset(metric.labels)
        series[metric.name] = labels
        if metric.kind == "histogram":
            series[f"{metric.name}_bucket"] = labels | {"le"}
            series[f"{metric.name}_sum"] = series[f"{metric.name}_count"] = labels
    return series


@pytest.mark.parametrize(
    "queries", [dashboard_queries(DASHBOARD), rule_queries(ALERTS)], ids=["dashboard", "alerts"]
)
def test_every_query_asks_for_what_there_is(queries: list[Query]) -> None:
    assert faults(queries, described()) == []


def test_every_metric_is_on_the_dashboard() -> None:
    asked = {s.name for q in dashboard_queries(DASHBOARD) for s in selectors(q.expr)}
    unseen = [
        m.name
        for kind in KINDS
        for m in kind().described()
        if not asked & {m.name, f"{m.name}_bucket", f"{m.name}_count"}
    ]
    assert unseen == ["dynamo_elastic_epoch"]


def test_a_wrong_query_would_be_seen() -> None:
    wrong = [
        Query("gone", "sum(rate(dynamo_elastic_gone_total[1m]))"),
        Query("label", 'sum by (kind, rank) (dynamo_elastic_operations_total{outcom="done"})'),
        Query("legend", "sum(dynamo_elastic_tokens_total)", "{{kind}}"),
        Query("both", "max(dynamo_elastic_ranks and on (slot) (dynamo_elastic_leading == 1))"),
    ]
    assert faults(wrong, described()) == [
        "gone: there is no dynamo_elastic_gone_total",
        "label: dynamo_elastic_operations_total has no label outcom",
        "label: dynamo_elastic_operations_total has no label rank",
        "legend: the legend shows kind, by which nothing is grouped",
        "both: dynamo_elastic_ranks has no label slot",
        "both: dynamo_elastic_leading has no label slot",
    ]
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        selectors("sum by (x (")


def test_every_panel_says_what_it_shows_in_which_unit() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    spots: set[tuple[int, int]] = set()
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & spots, f"{panel['title']} lies on another panel"
        assert at["x"] + at["w"] <= 24
        spots |= cells
    assert len({p["id"] for p in panels}) == len(panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize(
    "check",
    [
        ("check", "rules", "alerts.yaml"),
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "alerts_test.yaml"),
    ],
    ids=lambda check: " ".join(check),
)
def test_promtool_agrees(check: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *check], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
