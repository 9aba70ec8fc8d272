"""Every metric of the project, by name: the one importer of prometheus_client.

A part counts on the Metrics that it is given; each process has one, on a registry of its own.
`serve()` exposes it on loopback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from dynamo_elastic.errors import ResourceMissing

PREFIX = "dynamo_elastic"
LOOPBACK = "127.0.0.1"
_START_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """What a process counts. Label values are those of our enumerations, so they are few."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine_starts = self._counter(
            "engine_starts",
            "Rungs of the ladder that were tried; outcome 'failed' of parked and image is a failed "
            "restore.",
            ("tier", "outcome"),
        )
        self.fall_throughs = self._counter(
            "fall_throughs",
            "Better tiers that a start did not use, by kind of reason.",
            ("tier", "reason"),
        )
        self.start_seconds = Histogram(
            "engine_start_seconds",
            "From the request for an engine to its first right step.",
            ("tier",),
            namespace=PREFIX,
            registry=self.registry,
            buckets=_START_BUCKETS_S,
        )
        self.parks = self._counter(
            "parks", "Engines that left and were to be parked.", ("outcome",)
        )
        self.evictions = self._counter("parked_evictions", "Parked engines ended.", ("reason",))
        self.parked_engines = self._gauge("parked_engines", "Engines that are parked now.")
        self.parked_bytes = self._gauge("parked_host_bytes", "Host memory of parked engines.")

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, what, labels, namespace=PREFIX, registry=self.registry)

    def _gauge(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, what, labels, namespace=PREFIX, registry=self.registry)

    def value(self, name: str, **labels: str) -> float:
        """Of the sample `name` without our prefix, 0 if nobody has counted there yet."""
        return self.registry.get_sample_value(f"{PREFIX}_{name}", labels) or 0.0


@contextmanager
def serve(metrics: Metrics, port: int) -> Iterator[None]:
    """`metrics` can be scraped on loopback at `port`; 0: nothing is served. Raises ResourceMissing
    if the port is taken."""
    if not port:
        yield
        return
    try:
        server, thread = start_http_server(port, LOOPBACK, metrics.registry)
    except OSError as exc:
        raise ResourceMissing(
            f"port {port} on {LOOPBACK} can't be used ({exc.strerror})",
            remedy="choose another agent.metrics_port, or 0",
        ) from exc
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
