"""Every metric of the project, by name: the one importer of prometheus_client.

A part counts on the metrics that it is given; each process has those of its kind, on a registry of
its own, and `serve()` exposes it. Label values are those of our enumerations, so they are few: what
there may be a thousand of (ranks, links, operations) is in the operation's report, not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from dynamo_elastic.errors import ResourceMissing
from dynamo_elastic.phases import PHASES, TERMINAL, Kind, Phase, Step, committed

PREFIX = "dynamo_elastic"
LOOPBACK = "127.0.0.1"
TIERS = ("parked", "image", "cached", "cold")
"""Of agent.base.Tier, which this file can't see."""
FINISHES = ("stop", "length", "cancelled", "moved", "gone")
_START_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, *_START_BUCKETS_S[3:])
_GAP_BUCKETS_S = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Described:
    """One metric, as the reference shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    what: str


class ProcessMetrics:
    """What every kind has: a registry, and how metrics are made on it."""

    process = ""
    """Which process this is, as people call it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._described: list[Described] = []

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
        self._describe(f"{name}_total", "counter", what, labels)
        return Counter(name, what, labels, namespace=PREFIX, registry=self.registry)

    def _gauge(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Gauge:
        self._describe(name, "gauge", what, labels)
        return Gauge(name, what, labels, namespace=PREFIX, registry=self.registry)

    def _histogram(
        self, name: str, what: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> Histogram:
        self._describe(name, "histogram", what, labels)
        return Histogram(
            name, what, labels, namespace=PREFIX, registry=self.registry, buckets=buckets
        )

    def _describe(self, name: str, kind: str, what: str, labels: tuple[str, ...]) -> None:
        self._described.append(Described(f"{PREFIX}_{name}", kind, labels, what))

    def described(self) -> tuple[Described, ...]:
        """Every metric of this process, in the order in which it was made."""
        return tuple(self._described)

    def value(self, name: str, **labels: str) -> float:
        """Of the sample `name` without our prefix, 0 if nobody has counted there yet."""
        return self.registry.get_sample_value(f"{PREFIX}_{name}", labels) or 0.0


class AgentMetrics(ProcessMetrics):
    """What the agent of a host counts: engines, where they came from, and who is parked."""

    process = "agent"

    def __init__(self) -> None:
        super().__init__()
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
        self.start_seconds = self._histogram(
            "engine_start_seconds",
            "From the request for an engine to its first right step.",
            ("tier",),
            _START_BUCKETS_S,
        )
        self.parks = self._counter(
            "parks", "Engines that left and were to be parked.", ("outcome",)
        )
        for outcome in ("ok", "failed"):
            self.parks.labels(outcome)
            for tier in TIERS:
                self.engine_starts.labels(tier, outcome)
        self.evictions = self._counter("parked_evictions", "Parked engines ended.", ("reason",))
        self.parked_engines = self._gauge("parked_engines", "Engines that are parked now.")
        self.parked_bytes = self._gauge("parked_host_bytes", "Host memory of parked engines.")


class CoordinatorMetrics(ProcessMetrics):
    """What a coordinator counts. The one that leads has them all; of the others `leading` is 0 and
    the rest stays as it was when they led."""

    process = "coordinator"

    def __init__(self) -> None:
        super().__init__()
        self.leading = self._gauge("leading", "1 in the coordinator that leads, else 0.")
        self.ranks = self._gauge("ranks", "Ranks in force.")
        self.ranks_wanted = self._gauge("ranks_wanted", "Ranks of the target in force.")
        self.ranks_lost = self._gauge(
            "ranks_lost", "Ranks in force that can't serve any more and are to be evicted."
        )
        self.standby_slots = self._gauge("standby_slots", "Worker shells that are free to join.")
        self.suspects = self._gauge(
            "suspects", "Slots and images that failed as a joiner lately; two in a row are barred."
        )
        self.epoch = self._gauge("epoch", "Epoch in force.")
        self.operations_running = self._gauge(
            "operations_running", "Operations under way, by kind: 0 or 1.", ("kind",)
        )
        self.operations = self._counter(
            "operations", "Operations that ended, done or aborted.", ("kind", "outcome")
        )
        self.operation_seconds = self._histogram(
            "operation_seconds",
            "From the opening of an operation to its end.",
            ("kind", "outcome"),
            _STEP_BUCKETS_S,
        )
        self.phase_seconds = self._histogram(
            "phase_seconds",
            "One phase of one operation; outcome 'failed' is the one that had it undone.",
            ("kind", "phase", "outcome"),
            _STEP_BUCKETS_S,
        )
        self.step_seconds = self._histogram(
            "step_seconds",
            "One step of one rank, by its own clock; without an answer, the time waited for it.",
            ("step", "outcome"),
            _STEP_BUCKETS_S,
        )
        self.joins = self._counter(
            "joins", "Joiners that reported in, by the tier that their engine came from.", ("tier",)
        )
        self.moved_bytes = self._counter(
            "moved_bytes",
            "Bytes of weights: read from disk (load), or pushed from rank to rank (stream, "
            "push_experts).",
            ("step",),
        )
        self.push_seconds = self._counter(
            "push_seconds",
            "Seconds that ranks took for the bytes of moved_bytes, all ranks added up.",
            ("step",),
        )
        self.switch_gap_seconds = self._histogram(
            "switch_gap_seconds",
            "Pause of one rank at the switch: last step of the old group to the first of the new.",
            (),
            _GAP_BUCKETS_S,
        )
        self.decided_to_switched_seconds = self._histogram(
            "decided_to_switched_seconds",
            "From when a rank knew of the decision to its first right step in the new group.",
            (),
            _GAP_BUCKETS_S,
        )
        self.longest_gap_seconds = self._histogram(
            "operation_longest_gap_seconds",
            "Longest wait of any stream for its next token while an operation was under way.",
            ("kind",),
            _GAP_BUCKETS_S,
        )
        self.requests_moved = self._counter(
            "requests_moved", "Requests that went on elsewhere because their rank left."
        )
        self.members_lost = self._counter(
            "members_lost", "Ranks given up after COMMIT, by the phase it was seen in.", ("phase",)
        )
        self.reports = self._counter(
            "reports",
            "Reports written, or not, each once or twice: again when tokens have come in.",
            ("outcome",),
        )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """What happens seldom is there before it happens: the rate of a series that begins with
        its first event does not see that event."""
        for kind in Kind:
            self.longest_gap_seconds.labels(kind)
            for end in TERMINAL:
                self.operations.labels(kind, end)
                self.operation_seconds.labels(kind, end)
            for phase in (*(spec.phase for spec in PHASES[kind]), Phase.ABORTING):
                self.phase_seconds.labels(kind, phase, "done")
                if not committed(kind, phase):
                    self.phase_seconds.labels(kind, phase, "failed")
                else:
                    self.members_lost.labels(phase)
        for step in (Step.LOAD, Step.STREAM, Step.PUSH_EXPERTS):
            self.moved_bytes.labels(step)
            self.push_seconds.labels(step)
        for tier in TIERS:
            self.joins.labels(tier)
        for outcome in ("ok", "failed"):
            self.reports.labels(outcome)


class WorkerMetrics(ProcessMetrics):
    """What the shell of a rank counts: requests and tokens as they pass through it."""

    process = "worker"

    def __init__(self) -> None:
        super().__init__()
        self.requests_running = self._gauge("requests_running", "Requests under way here.")
        self.requests = self._counter(
            "requests",
            "Requests that ended here; 'moved' goes on elsewhere, 'gone' is a client that left.",
            ("outcome",),
        )
        for finish in FINISHES:
            self.requests.labels(finish)
        self.tokens = self._counter("tokens", "Tokens handed out.")
        self.token_gap_seconds = self._histogram(
            "token_gap_seconds",
            "Wait of a stream between two of its tokens.",
            (),
            _GAP_BUCKETS_S,
        )


KINDS: tuple[type[ProcessMetrics], ...] = (CoordinatorMetrics, AgentMetrics, WorkerMetrics)
"""Of every process that serves metrics."""


@contextmanager
def serve(
    metrics: ProcessMetrics, port: int, *, host: str = LOOPBACK, setting: str = "agent.metrics_port"
) -> Iterator[None]:
    """`metrics` can be scraped on `host` at `port`; 0: nothing is served. Raises ResourceMissing,
    naming `setting`, if the port is taken."""
    if not port:
        yield
        return
    try:
        server, thread = start_http_server(port, host, metrics.registry)
    except OSError as exc:
        raise ResourceMissing(
            f"port {port} on {host} can't be used ({exc.strerror})",
            remedy=f"choose another {setting}, or 0",
        ) from exc
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
