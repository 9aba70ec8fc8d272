"""The demo: ranks serve under load, the planner decides otherwise, act by act; every token is
checked."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.config import DeploymentConfig, parse_config
from dynamo_elastic.coordinator.records import OperationRecord, decode
from dynamo_elastic.coordinator.status import read_status
from dynamo_elastic.demo.load import (
    Load,
    LoadSummary,
    Prompt,
    longest_gap,
    reference_texts,
    summarize,
)
from dynamo_elastic.demo.view import PhaseFacts, TimelineFile, render
from dynamo_elastic.dynamo.launch import PlannerControl
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.shape import CONFIG_FILE
from dynamo_elastic.phases import Phase
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.types import Epoch, OperationId, WorkerId

CLIENTS = 8
_OPERATION_TIMEOUT_S = 90.0
_SETTLE_S = 2.0
_WORDS = ("river", "stone", "light", "maple", "cloud", "harbor", "amber", "meadow")


@dataclass(frozen=True, slots=True)
class Act:
    """One decision of the planner, and what it leads to."""

    title: str
    limits: dict[str, int]
    """What the planner is told."""
    ranks: int
    tiers: frozenset[Tier]
    """Where the joiners come from."""


@dataclass(frozen=True, slots=True)
class Script:
    """A deployment, its load, and the acts to play with it."""

    config: DeploymentConfig
    prompts: list[Prompt]
    clients: int
    acts: tuple[Act, ...]
    cold_before_load: bool = False
    """A cold boot that takes long enough is not also slowed down by the load."""


@dataclass(slots=True)
class Facts:
    """What the demo found out; the table and the verdict are made from it."""

    acts: tuple[Act, ...]
    cold: StartedEngine | None = None
    operations: list[OperationRecord] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Longest token gap of each act."""
    summary: LoadSummary | None = None
    final_ranks: int = 0
    leftovers: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Why the demo did not succeed; empty if it did."""
        found = [
            f"operation {op.kind} ended {op.phase}: {op.failure}"
            for op in self.operations
            if op.phase is not Phase.DONE
        ]
        wanted = [act.ranks for act in self.acts]
        widths = [op.plan.after.world_size for op in self.operations]
        if widths != wanted:
            found.append(f"the planner's operations led to {widths}, not {wanted}")
        if self.final_ranks != wanted[-1]:
            found.append(f"{self.final_ranks} ranks serve at the end, not {wanted[-1]}")
        for act, op in zip(self.acts, self.operations, strict=False):
            if restored_from(op) != act.tiers:
                expected = sorted(act.tiers) or "nowhere"
                found.append(f"joiners came from {sorted(restored_from(op))}, not {expected}")
        if self.summary is None or not self.summary.tokens_equal:
            found.append("tokens differ from the never-scaled run")
        if self.summary is not None and self.summary.requests_failed:
            found.append(f"{self.summary.requests_failed} requests failed: {self.summary.errors}")
        return found + [f"left behind: {what}" for what in self.leftovers]


def demo_config(work_dir: Path, deployment: str = "demo", **more: Any) -> DeploymentConfig:
    """A deployment on free ports, its model and images under `work_dir`, made if missing.

    `more` are further sections of the YAML, merged over the demo's.
    """
    model = Path(more.get("model", {}).get("path", work_dir / "model"))
    if not (model / CONFIG_FILE).exists():
        write_model(model)
    ports = _free_ports(4)
    root = os.geteuid() == 0
    run_dir = "/run/dynamo-elastic" if root else f"{tempfile.gettempdir()}/dynamo-elastic"
    settings: dict[str, Any] = {
        "deployment": deployment,
        "model": {"path": str(model), "name": "elastic-demo"},
        "scale": {"initial_ranks": 2, "min_ranks": 2, "max_ranks": 4},
        "etcd": {"port": ports[0], "peer_port": ports[1]},
        "frontend": {"port": ports[2]},
        "planner": {"control_port": ports[3]},
        "snapshot": {"catalog": str(work_dir / "images"), "enabled": root},
        "observe": {"operations_dir": str(work_dir / "operations")},
        "run_dir": run_dir,
    }
    for section, values in more.items():
        settings[section] = {**settings.get(section, {}), **values}
    return parse_config(settings)


def demo_prompts() -> list[Prompt]:
    """Prompts with fixed seeds; some short, so that some streams end while a rank drains."""
    return [
        Prompt(
            f"{word} {_WORDS[(i * 3 + 1) % 8]} {_WORDS[(i * 5 + 2) % 8]}",
            100 + i,
            24 + 24 * (i % 4),
        )
        for i, word in enumerate(_WORDS)
    ]


def reference_script(work_dir: Path) -> Script:
    """The reference engine: 2 ranks, 4 from images, 2, and 4 again from parked engines."""
    config = demo_config(work_dir)
    first = Tier.IMAGE if config.snapshot.enabled else Tier.COLD
    again = "planner: at least 4 ranks again; those that left are parked"
    acts = (
        Act("planner: at least 4 ranks", {"min_endpoint": 4}, 4, frozenset({first})),
        Act(
            "planner: a budget of 2 GPUs", {"min_endpoint": 2, "max_gpu_budget": 2}, 2, frozenset()
        ),
        Act(again, {"min_endpoint": 4, "max_gpu_budget": 4}, 4, frozenset({Tier.PARKED})),
    )
    return Script(config, demo_prompts(), CLIENTS, acts)


async def run_demo(script: Script, console: Console) -> list[str]:
    """Play all of `script`; returns its faults, empty when everything held."""
    config, facts = script.config, Facts(script.acts)
    watched: set[int] = set()
    async with running(config, lambda text: console.print(f"[dim]{text}[/dim]")) as deployment:
        watched.update(deployment.supervisor.pids.values())
        await _scale_under_load(deployment, script, facts, console)
        watched.update(deployment.supervisor.pids.values())
    facts.leftovers = leftovers(config, watched)
    console.print(_table(facts))
    console.print(f"reports: {config.operations_dir}")
    faults = facts.faults()
    if faults:
        console.print(f"logs are kept in {config.state_dir / 'logs'}")
    else:
        shutil.rmtree(config.state_dir)
    return faults


async def _scale_under_load(
    deployment: Deployment, script: Script, facts: Facts, console: Console
) -> None:
    config = deployment.config
    load = Load(deployment.url, config.model.name, script.prompts, script.clients)
    planner = PlannerControl(config.planner.control_port)
    timeline = TimelineFile(deployment.timeline)
    if script.cold_before_load:
        facts.cold = await _cold_joiner(deployment, console)
    serving = f"{config.scale.initial_ranks} ranks serve; {script.clients} clients stream in a loop"
    console.print(f"[bold]{serving}[/bold]")
    load.start()
    await load.wait_for_each_prompt(timeout_s=60)
    reference = reference_texts(load.results)
    if not script.cold_before_load:
        facts.cold = await _cold_joiner(deployment, console)
    spans: list[tuple[float, float]] = []
    for act in script.acts:
        console.print(f"[bold]{act.title}[/bold]")
        began_s = time.monotonic()
        trigger = partial(planner.set_limits, **act.limits)
        facts.operations += await _operation(deployment, timeline, console, trigger)
        spans.append((began_s, time.monotonic()))
        await asyncio.sleep(_SETTLE_S)
    await load.stop()
    # Not before every stream has ended: those that were moved are still open when an act is over.
    facts.gaps_s = [longest_gap(load.results, *span) for span in spans]
    facts.summary = summarize(load.results, reference)
    status = await read_status(deployment.store, deployment.keys)
    facts.final_ranks = status.topology.world_size if status.topology else 0


async def _cold_joiner(deployment: Deployment, console: Console) -> StartedEngine:
    console.print("[bold]one joiner is booted cold, for comparison[/bold]")
    return await cold_start(deployment)


async def cold_start(deployment: Deployment) -> StartedEngine:
    """Boot one joiner cold, for comparison; end it again."""
    slot = deployment.config.scale.max_ranks - 1
    topology = (await read_status(deployment.store, deployment.keys)).topology
    epoch = topology.epoch if topology is not None else Epoch(0)
    engine = await deployment.agent.start_engine(
        slot,
        WorkerId(f"slot{slot}"),
        OperationId(f"demo-cold-{epoch}"),
        epoch,
        tiers=(Tier.COLD,),
        timeout_s=deployment.config.scale.restore_timeout_s,
    )
    await deployment.agent.stop_engine(slot, engine.incarnation)
    return engine


async def _operation(
    deployment: Deployment,
    timeline: TimelineFile,
    console: Console,
    trigger: Callable[[], Awaitable[Any]],
) -> list[OperationRecord]:
    """Trigger an operation, show it live until it is closed; returns its record."""
    list(timeline.poll())
    seen = set(timeline.operations)
    began_s = time.monotonic()
    await trigger()
    with Live(console=console, refresh_per_second=10, transient=False) as live:
        while time.monotonic() - began_s < _OPERATION_TIMEOUT_S:
            list(timeline.poll())
            fresh = [op for key, op in timeline.operations.items() if key not in seen]
            if fresh:
                live.update(render(fresh[-1], time.time()))
            if fresh and fresh[-1].ended_at_s is not None:
                break
            await asyncio.sleep(0.05)
    console.print()
    stored = await deployment.store.get(deployment.keys.last)
    await asyncio.sleep(0.5)
    return [] if stored is None else [decode(OperationRecord, stored.value)]


def restored_from(op: OperationRecord) -> set[str]:
    """The tiers that the joiners of `op` came from."""
    return {tier for p in op.phases for tier in PhaseFacts.of(p.detail).tiers}


def _table(facts: Facts) -> Table:
    table = Table(title="what happened", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in _rows(facts):
        table.add_row(name, value)
    return table


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.cold is not None:
        yield "joiner ready, booted cold for comparison", f"{facts.cold.ready_s:.2f} s"
    shown: set[str] = set()
    for op, gap_s in zip(facts.operations, facts.gaps_s, strict=False):
        widths = f"{op.plan.before.world_size} -> {op.plan.after.world_size}"
        widths += " again" if widths in shown else ""
        shown.add(widths)
        yield f"{widths}: whole operation", f"{op.elapsed_s:.2f} s"
        for p in op.phases:
            said = PhaseFacts.of(p.detail)
            if said.ready_s:
                tiers = ", ".join(sorted(set(said.tiers)))
                yield f"{widths}: joiner ready, {tiers}", f"{max(said.ready_s):.2f} s"
            if said.size_bytes:
                rate_gbps = said.size_bytes / max(said.transfer_s, 1e-9) / 1e9
                size = f"{said.size_bytes / 1e6:.1f} MB, {rate_gbps:.2f} GB/s"
                yield f"{widths}: {p.phase} moved", size
            if said.switch_s:
                yield f"{widths}: decision to first step", f"{said.switch_s * 1e3:.0f} ms"
            if p.phase is Phase.DRAIN:
                yield f"{widths}: requests moved", str(said.moved)
        yield f"{widths}: longest token gap", f"{gap_s * 1e3:.0f} ms"
    if facts.summary is not None:
        yield "requests served", str(facts.summary.requests_total)
        yield "requests failed", str(facts.summary.requests_failed)
        equal = "equal" if facts.summary.tokens_equal else "DIFFERENT"
        yield "tokens against the never-scaled run", equal


def leftovers(config: DeploymentConfig, pids: set[int]) -> list[str]:
    """Processes and sockets of the deployment that still exist."""
    marker = str(config.state_dir)
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        ours = process.info["pid"] in pids or marker in command
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(f"process {process.info['pid']}: {command[:80]}")
    sockets = config.state_dir.rglob("*.sock") if config.state_dir.exists() else ()
    return found + [f"socket {path}" for path in sockets]


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    held = [socket.socket() for _ in range(count)]
    try:
        for s in held:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in held]
    finally:
        for s in held:
            s.close()
