"""One GPU: kill, error, stop and delay at every failpoint that only engines on GPUs pass: of a rank
that joins another one and leaves, and of an agent that restores, parks and unparks.

`python benchmarks/gpu_failpoints.py --out DIR` writes verdicts and where they come from to DIR;
`dynamo-elastic-chaos report --work-dir DIR --onto RESULT` adds them to the fault matrix.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from provenance import provenance

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.testing.chaos.gpu_scenario import GpuScenario, Move, gpu_scenarios
from dynamo_elastic.testing.chaos.verdict import RUNS, Verdict
from dynamo_elastic.testing.deployments import deployment
from dynamo_elastic.testing.engine_process import SMALL_SHAPE, engine_config
from dynamo_elastic.testing.gpu_failpoint_agent import parker
from dynamo_elastic.testing.gpu_failpoint_ranks import ranks
from dynamo_elastic.testing.gpu_fleet import gpu_environment
from dynamo_elastic.testing.gpu_meter import Meter
from dynamo_elastic.testing.gpu_world import SIZES, end_leftovers, image_of, leftovers
from dynamo_elastic.topology import EngineShape

PROVENANCE = "provenance.json"
SHAPE = replace(SMALL_SHAPE, hidden_size=2048, num_hidden_layers=2, num_experts=16)
SLOTS = SHAPE.num_experts
"""Every rank has every expert: none is lost with its rank."""
ENGINE: dict[str, Any] = {
    "device": "cuda",
    "slots_per_rank": SLOTS,
    "batch_tokens": 8,
    "max_context": 64,
    "kv_blocks": 64,
    "peer_timeout_s": 0.8,
}
RANKS, AGENT = (Move.JOIN,), (Move.RESTORE, Move.PARK, Move.UNPARK)


class Table(Protocol):
    """Where runs are played."""

    async def play(self, scenario: GpuScenario) -> Verdict: ...


class Player:
    """Plays runs as long as there is time, and writes each verdict down."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.bad = 0
        self._out = out
        self._until_s = time.monotonic() + seconds

    async def play(self, table: Table, todo: list[GpuScenario]) -> None:
        """Runs of `todo`, each taken from it, until one hangs or time is over."""
        while todo and not self.out_of_time:
            verdict = await table.play(todo.pop(0))
            self._say(verdict)
            if verdict.hang:
                return

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self._until_s

    def fail(self, what: str) -> None:
        """Something besides the runs is wrong."""
        self.bad += 1
        print(f"BAD {what}", flush=True)

    def _say(self, verdict: Verdict) -> None:
        self.bad += not verdict.good
        with (self._out / RUNS).open("a") as file:
            file.write(json.dumps(verdict.as_json()) + "\n")
        word = "ok" if verdict.good else "BAD"
        missed = "" if verdict.fired else " (not reached)"
        why = " ".join((*verdict.violations, verdict.hang))
        print(f"{word} {verdict.scenario}{missed}; {verdict.seconds} s {why}", flush=True)


async def play_ranks(player: Player, directory: Path, used_mib: Callable[[], int]) -> None:
    """Ranks that share the GPU; made anew after a run that hangs."""
    model = directory / "model"
    write_model(model, SHAPE, seed=5, in_file=False)
    todo = list(gpu_scenarios(*RANKS))
    while todo and not player.out_of_time:
        place = Path(tempfile.mkdtemp(dir=directory))
        failpoints = place / "failpoints"
        failpoints.mkdir()
        config = engine_config(model, place / "run", **ENGINE)
        shape = EngineShape(SHAPE.num_experts, SLOTS)
        try:
            async with ranks(config, shape, gpu_environment(0), failpoints, used_mib) as table:
                print("a rank passes:", *sorted(await table.passed()), flush=True)
                await player.play(table, todo)
                if grown := await table.grown():
                    player.fail(grown)
        except (ElasticError, TimeoutError) as exc:
            player.fail(f"these ranks: {type(exc).__name__}: {exc}")


async def play_agent(player: Player, directory: Path, used_mib: Callable[[], int]) -> None:
    """An agent, and an engine of another slot."""
    host = directory / "host"
    host.mkdir()
    config = deployment(host, slots=2, agent={"gpus": [0, 0]})
    print("image:", (await asyncio.to_thread(image_of, config)).image_id, flush=True)
    failpoints = directory / "agent-failpoints"
    failpoints.mkdir()
    todo = list(gpu_scenarios(*AGENT))
    while todo and not player.out_of_time:
        async with parker(config, failpoints, used_mib, **SIZES) as table:
            await player.play(table, todo)
    if left := leftovers(directory):
        player.fail("; ".join(left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".chaos-gpu"))
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no run after these")
    parser.add_argument("--only", choices=("ranks", "agent"))
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (out / RUNS).unlink(missing_ok=True)
    (out / PROVENANCE).write_text(json.dumps(provenance(), indent=1))
    player, meter = Player(out, arguments.seconds), Meter()
    directory = Path(tempfile.mkdtemp(prefix="de-gpu-"))

    def used_mib() -> int:
        return meter.used_mib()[0]

    try:
        if arguments.only != "agent":
            asyncio.run(play_ranks(player, directory, used_mib))
        if arguments.only != "ranks":
            asyncio.run(play_agent(player, directory, used_mib))
    finally:
        meter.close()
        end_leftovers(directory)
        shutil.rmtree(directory, ignore_errors=True)
    sys.exit(1 if player.bad else 0)


if __name__ == "__main__":
    main()
