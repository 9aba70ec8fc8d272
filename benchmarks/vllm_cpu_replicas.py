"""Real vLLM on the CPU: a cold replica against restored ones, in one run and under one load.

Ready is what the agent measures: from the request for an engine to the answer of one that has
proven itself. Prompts are asked of one replica that was booted cold first, then of three, two of
them restored, round-robin; answers must be the same, greedy and seeded.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
from provenance import write_result
from rich.console import Console

from dynamo_elastic.agent.base import StartedEngine, Tier
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.coordinator.records import OperationRecord
from dynamo_elastic.demo.load import Load, LoadSummary, reference_texts, summarize
from dynamo_elastic.demo.run import cold_start, restored_from
from dynamo_elastic.demo.view import PhaseFacts
from dynamo_elastic.demo.vllm import known_words, short_prompts, vllm_config
from dynamo_elastic.engine.launch import engine_python
from dynamo_elastic.engine.vllm.versions import installed
from dynamo_elastic.serve.deployment import Deployment, running
from dynamo_elastic.testing.cycles import scale_to

PROMPTS = 64
ROUNDS = 3
"""How often each prompt is asked of all replicas together: round-robin brings it to each."""
TOKENS = 24
REPLICAS = 3
CLIENTS = 1
"""Of the load beside; each keeps a replica, and so a core, busy all the time."""
_TIMEOUT_S = 120.0


class Run:
    """What was measured."""

    def __init__(self) -> None:
        self.cold: list[StartedEngine] = []
        self.ups: list[OperationRecord] = []
        self.downs: list[OperationRecord] = []
        self.first: dict[int, str] = {}
        self.later: list[dict[int, str]] = []
        self.summary: LoadSummary | None = None

    def restored_s(self) -> list[float]:
        return [
            ready_s
            for op in self.ups
            for p in op.phases
            for ready_s in PhaseFacts.of(p.detail).ready_s
        ]


def prompt(number: int) -> dict[str, Any]:
    """Every other one is greedy; the others are drawn with a seed of their own."""
    return {
        "prompt": known_words(number),
        "max_tokens": TOKENS,
        "temperature": float(number % 2),
        "seed": number,
    }


async def ask_all(url: str, model: str) -> dict[int, str]:
    """The answers to all prompts, four at a time. Raises RuntimeError if one fails."""
    gate = asyncio.Semaphore(4)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask(number: int) -> str:
            body = {"model": model, **prompt(number)}
            async with gate, session.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"prompt {number}: {await response.text()}")
                answer = await response.json()
            return str(answer["choices"][0]["text"])

        texts = await asyncio.gather(*map(ask, range(PROMPTS)))
    return dict(enumerate(texts))


async def measure(config: DeploymentConfig, cycles: int, console: Console) -> Run:
    run = Run()
    async with running(config, console.print) as deployment:
        run.first = await ask_all(deployment.url, config.model.name)
        load = Load(deployment.url, config.model.name, short_prompts(), CLIENTS)
        load.start()
        await load.wait_for_each_prompt(timeout_s=_TIMEOUT_S)
        reference = reference_texts(load.results)
        for cycle in range(1, cycles + 1):
            console.print(f"cycle {cycle}: a cold replica, then 1 -> {REPLICAS} -> 1")
            run.cold.append(await cold_start(deployment))
            await one_cycle(deployment, run)
        await load.stop()
        run.summary = summarize(load.results, reference)
    return run


async def one_cycle(deployment: Deployment, run: Run) -> None:
    run.ups.append(await scale_to(deployment, REPLICAS))
    for _ in range(ROUNDS):
        run.later.append(await ask_all(deployment.url, deployment.config.model.name))
    run.downs.append(await scale_to(deployment, 1))


def metrics_of(run: Run) -> dict[str, float]:
    tiers = {tier for op in run.ups for tier in restored_from(op)}
    if tiers != {Tier.IMAGE}:
        raise SystemExit(f"not every replica came from an image: {tiers}")
    if run.summary is None:
        raise SystemExit("there was no load")
    cold_s = statistics.median(engine.ready_s for engine in run.cold)
    restored_s = statistics.median(run.restored_s())
    equal = [n for n, text in run.first.items() if all(x[n] == text for x in run.later)]
    return {
        "ready_cold_s": round(cold_s, 2),
        "ready_restored_s": round(restored_s, 2),
        "ready_ratio": round(cold_s / restored_s, 1),
        "up_s": round(statistics.median(op.elapsed_s for op in run.ups), 2),
        "down_s": round(statistics.median(op.elapsed_s for op in run.downs), 2),
        "replicas": REPLICAS,
        "prompts": PROMPTS,
        "prompts_equal": len(equal),
        "requests_total": run.summary.requests_total + PROMPTS * (1 + len(run.later)),
        "requests_failed": run.summary.requests_failed,
        "streams_equal": int(run.summary.tokens_equal),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, default=Path(".demo"))
    arguments = parser.parse_args()
    console = Console(highlight=False)
    # The demo's own deployment: each uses the images that the other made.
    config = vllm_config(arguments.work_dir.resolve(), replicas=REPLICAS, planner=False)
    began_s = time.monotonic()
    run = asyncio.run(measure(config, arguments.cycles, console))
    metrics = metrics_of(run)
    detail = {
        "cold_s": [engine.ready_s for engine in run.cold],
        "restored_s": run.restored_s(),
        "load": asdict(run.summary) if run.summary else {},
        "engine": installed(engine_python(config.engine)),
        "args": config.engine.model_dump(mode="json"),
        "took_s": round(time.monotonic() - began_s, 1),
    }
    console.print(metrics)
    console.print(write_result("vllm_cpu_replicas", metrics, detail))


if __name__ == "__main__":
    main()
