"""What gpu_scale does to a host, operation by operation, and what it reads off each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_report import Report

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.engine.base import Request
from dynamo_elastic.engine.reference.model import TileSize
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.testing.fleet import each
from dynamo_elastic.testing.gpu_deployment import GpuHost, Streams
from dynamo_elastic.types import WorkerId

_PROMPTS = tuple(tuple(7 + (i * 37 + k * 11) % 490 for k in range(9 + i)) for i in range(4))


class Scenario:
    """One host through its operations; every number goes into `report`."""

    def __init__(self, report: Report, host: GpuHost, streams: Streams) -> None:
        self._report = report
        self._host = host
        self._streams = streams
        self._windows: dict[str, tuple[float, float]] = {}
        self._logits: list[tuple[str, int, torch.Tensor]] = []
        """Where and when, which prompt, what a rank said."""

    async def up(self, name: str, target: int, tier: Tier) -> None:
        """Joiners come from `tier`; the time is that until each has given a user its first token.
        The experts move afterwards."""
        fleet, laps = self._host.fleet, _Laps()
        width = fleet.in_force.world_size
        started = await asyncio.gather(*(self._host.start(s, tier) for s in range(width, target)))
        laps.end("restore")
        plan = fleet.plan(target)
        await fleet.connect(plan.after)
        laps.end("connect")
        epoch = plan.after.epoch
        reports = await each(
            [fleet.all[w] for w in plan.retained],
            lambda e: e.client.push_dense(epoch, plan.retained, plan.joiners),
        )
        laps.end("stream")
        joiners = [fleet.all[w] for w in plan.joiners]
        await each(joiners, lambda e: e.client.check(reports[0].digests[e.worker_id]))
        laps.end("check")
        await fleet.switch(plan.after)
        laps.end("commit")
        await each(joiners, lambda e: e.client.canary())
        laps.end("canary")
        asked = {e.worker_id: Request(f"{name}/{e.worker_id}", (9, 8, 7, 6), 4) for e in joiners}
        await each(joiners, lambda e: e.generate(asked[e.worker_id]))
        firsts = [e.token_times[asked[e.worker_id].request_id][0] for e in joiners]
        laps.end("first_token", max(firsts))
        self._report.metric(f"{name}_s", laps.total_s)
        serving_s = time.monotonic()
        await fleet.rebalance(plan.after, plan.settled)
        moved_s = time.monotonic()
        self._phases(name, laps)
        self._report.metric(f"{name}_rebalance_s", moved_s - serving_s)
        self._report.note(f"{name}_engine_ready_s", [round(s.ready_s, 4) for s in started])
        self._report.note(f"{name}_dense_bytes", sum(r.size_bytes for r in reports))
        self._windows[f"{name}_token_gap_max_s"] = (laps.began_s, serving_s)
        self._windows[f"{name}_rebalance_gap_max_s"] = (serving_s, moved_s)

    async def down(self, name: str, target: int) -> None:
        """Leavers are parked; the time is that until their GPUs are free."""
        fleet, laps = self._host.fleet, _Laps()
        plan = await fleet.scale_down(target)
        laps.end("until_left")
        await asyncio.gather(*(self._host.park(w) for w in plan.leavers))
        laps.end("park")
        self._report.metric(f"{name}_s", laps.total_s)
        self._phases(name, laps)
        self._windows[f"{name}_token_gap_max_s"] = (laps.began_s, time.monotonic())

    def _phases(self, name: str, laps: _Laps) -> None:
        self._report.note(f"{name}_phases_s", laps.phases_s)
        longest = max(laps.phases_s, key=lambda phase: laps.phases_s[phase])
        self._report.note(f"{name}_longest_phase", longest)

    def gaps(self) -> None:
        """The longest gaps of each operation; the streams have ended."""
        streams = self._streams
        for name, window in self._windows.items():
            self._report.metric(name, streams.longest_gap_s(*window))
            self._report.note(f"{name}_by_stream", streams.gap_quantiles_s(*window))
        for side, kind in (("up", ("up_",)), ("down", ("down",))):
            found = [
                self._report.metrics[name]
                for name in self._windows
                if name.startswith(kind) and "rebalance" not in name
            ]
            if found:
                self._report.metric(f"token_gap_{side}_max_s", max(found))
        if streams.moved_gaps_s:
            self._report.metric("moved_gap_max_s", max(streams.moved_gaps_s))
        self._report.metric("requests_moved", len(streams.moved_gaps_s))

    async def look(self, when: str) -> None:
        """Logits after a few prompts, of every rank in force."""
        for engine in self._host.fleet.of(self._host.fleet.in_force):
            for number, prompt in enumerate(_PROMPTS):
                logits = torch.tensor(await engine.logits(prompt))
                self._logits.append((f"{when} {engine.worker_id}", number, logits))

    def compare(self, model: Path, tile: TileSize, store: Any) -> None:
        """All logits against those of one rank that holds every expert, without graphs and expert
        buffer. The engines have ended."""
        oracle = Oracle(model, tile, store)
        expected = [oracle.logits(list(prompt)) for prompt in _PROMPTS]
        errors: dict[str, float] = {}
        for where, number, logits in self._logits:
            errors[where] = max(errors.get(where, 0.0), _relative(logits, expected[number]))
        self._report.note("logits_rel_err", {k: round(v, 6) for k, v in errors.items()})
        self._report.metric("logits_max_rel_err", max(errors.values()))
        first = {number: logits for _, number, logits in reversed(self._logits)}
        drift = [_relative(logits, first[number]) for _, number, logits in self._logits]
        self._report.metric("logits_max_rel_drift", max(drift))
        best = [int(e.argmax()) for e in expected]
        same = [int(logits.argmax()) == best[number] for _, number, logits in self._logits]
        self._report.metric("logits_same_best_token", sum(same) / len(same))


class _Laps:
    """How long each phase took, one after the other."""

    def __init__(self) -> None:
        self.began_s = self._last_s = time.monotonic()
        self.phases_s: dict[str, float] = {}

    def end(self, phase: str, at_s: float | None = None) -> None:
        now_s = time.monotonic() if at_s is None else at_s
        self.phases_s[phase] = round(now_s - self._last_s, 4)
        self._last_s = now_s
        print(f"phase {phase}: {self.phases_s[phase]:.4f} s", flush=True)

    @property
    def total_s(self) -> float:
        return self._last_s - self.began_s


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def home(ranks: int) -> Sequence[WorkerId]:
    """Those that stay."""
    return [WorkerId(f"slot{slot}") for slot in range(ranks)]
