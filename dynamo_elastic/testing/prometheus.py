"""A real Prometheus on loopback, that scrapes a deployment and is asked what a dashboard asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dynamo_elastic.testing.etcd_process import free_port

PROGRAM = "prometheus"
_INTERVAL = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel: (unix seconds, value), without holes that Prometheus left out."""

    name: str
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """A server that scrapes; ask it."""

    def __init__(self, url: str, interval_s: int) -> None:
        self.url = url
        self._interval_s = interval_s

    def ask(self, path: str, **query: Any) -> Any:
        """The `data` of an answer. Raises ValueError with its error otherwise."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as exc:
            raise ValueError(f"{query}: {exc.read().decode()}") from exc

    def wait_until_up(self, targets: int, *, timeout_s: float = 30.0) -> None:
        """Return once so many targets have been scraped. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            try:
                up = self.ask("query", query="up == 1")["result"]
            except OSError:
                up = []
            if len(up) >= targets:
                return
            time.sleep(0.3)
        raise TimeoutError(f"fewer than {targets} targets are up after {timeout_s:g} s")

    def series(self, expr: str, legend: str, since_s: float, until_s: float) -> list[Series]:
        """What a panel's expression gives over that time."""
        asked = expr.replace(_INTERVAL, f"{8 * self._interval_s}s")
        step_s = max(1.0, (until_s - since_s) / 240)
        data = self.ask("query_range", query=asked, start=since_s, end=until_s, step=step_s)
        found = []
        for one in data["result"]:
            name = legend
            for label, value in one["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            points = tuple((float(t), float(v)) for t, v in one["values"] if v != "NaN")
            if points:
                found.append(Series(name, points))
        return found


@contextmanager
def prometheus(
    ports: Sequence[int], directory: Path, *, interval_s: int = 1
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes those ports of loopback while in the context."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise FileNotFoundError(f"{PROGRAM} is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    targets = [f"127.0.0.1:{port}" for port in ports]
    config = directory / "prometheus.yaml"
    jobs = [{"job_name": "dynamo-elastic", "static_configs": [{"targets": targets}]}]
    settings = {"global": {"scrape_interval": f"{interval_s}s"}, "scrape_configs": jobs}
    config.write_text(yaml.safe_dump(settings))
    port = free_port()
    argv = [program, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    argv.append(f"--web.listen-address=127.0.0.1:{port}")
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}", interval_s)
    finally:
        process.terminate()
        process.wait(20)
