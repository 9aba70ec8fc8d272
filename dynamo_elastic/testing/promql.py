"""What PromQL expressions ask for, metric names and labels, to compare with a scrape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

_INTERVAL = "$__rate_interval"
OF_THE_SCRAPE = frozenset({"instance", "job"})
"""Labels that Prometheus adds to every target's series."""
_CHILDREN = ("lhs", "rhs", "expr", "vector_selector")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and where it is."""

    where: str
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric, and every label that an expression takes it to have."""

    name: str
    labels: frozenset[str]


def selectors(expr: str) -> list[Selector]:
    """Every selector of `expr`. Raises ValueError if it is not PromQL."""
    return list(_selectors(promql_parser.parse(expr.replace(_INTERVAL, "1m")), frozenset()))


def _selectors(node: Any, grouped: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        matched = {m.name for m in node.matchers.matchers}
        yield Selector(node.name or "", grouped | matched)
        return
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
        grouped |= set(modifier.labels)
    matching = getattr(modifier, "matching", None)
    if isinstance(node, promql_parser.BinaryExpr) and matching is not None:
        grouped |= set(matching.labels)
    for name in _CHILDREN:
        child = getattr(node, name, None)
        if child is not None:
            yield from _selectors(child, grouped)
    for child in getattr(node, "args", None) or ():
        yield from _selectors(child, grouped)


def grouped_by(expr: str) -> frozenset[str]:
    """Labels that the series of the outermost aggregation have."""
    node = promql_parser.parse(expr.replace(_INTERVAL, "1m"))
    while not isinstance(node, promql_parser.AggregateExpr):
        below = [getattr(node, name, None) for name in _CHILDREN]
        below += list(getattr(node, "args", None) or ())
        inner = [b for b in below if b is not None and not _is_number(b)]
        if not inner:
            return frozenset()
        node = inner[0]
    return frozenset(node.modifier.labels if node.modifier else ())


def _is_number(node: Any) -> bool:
    return isinstance(node, promql_parser.NumberLiteral)


def dashboard_queries(path: Path) -> list[Query]:
    """Of every panel and annotation of a Grafana dashboard."""
    board = json.loads(path.read_text())
    queries = [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    for note in board["annotations"]["list"]:
        queries.append(Query(note["name"], note["expr"], note["titleFormat"]))
    return queries


def rule_queries(path: Path) -> list[Query]:
    """Of every alert in a file of rules."""
    rules = yaml.safe_load(path.read_text())
    return [Query(r["alert"], r["expr"]) for g in rules["groups"] for r in g["rules"]]


def faults(queries: list[Query], series: Mapping[str, frozenset[str]]) -> list[str]:
    """What `queries` ask for and `series` (sample name -> its labels) does not have."""
    found = []
    for query in queries:
        for selector in selectors(query.expr):
            if selector.name not in series:
                found.append(f"{query.where}: there is no {selector.name}")
                continue
            missing = selector.labels - series[selector.name] - OF_THE_SCRAPE
            found += [f"{query.where}: {selector.name} has no label {m}" for m in sorted(missing)]
        shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        for label in sorted(shown - grouped_by(query.expr)):
            found.append(f"{query.where}: the legend shows {label}, by which nothing is grouped")
    return found
