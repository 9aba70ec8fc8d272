"""The second demo: real vLLM on the CPU, one replica, three from images, one again."""

from __future__ import annotations

from pathlib import Path

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.demo.load import Prompt
from dynamo_elastic.demo.run import Act, Script, demo_config
from dynamo_elastic.engine.reference.make_model import SPECIAL, words
from dynamo_elastic.engine.shape import CONFIG_FILE
from dynamo_elastic.engine.vllm.make_model import TINY_SHAPE, write_model

CLIENTS = 4
ENVIRONMENT = Path(".venv-vllm")
"""Made by deploy/vllm-cpu.sh."""
ARGS = (
    "--dtype float32 --max-model-len 1024 --max-num-seqs 16 "
    "--kv-cache-memory-bytes 67108864 --enforce-eager"
)
BOOT_TIMEOUT_S = 300.0
"""A cold boot is a minute of one core, and two of a busy one."""


def vllm_config(
    work_dir: Path,
    deployment: str = "demo-vllm-cpu",
    *,
    replicas: int = 3,
    planner: bool = True,
) -> DeploymentConfig:
    """Up to `replicas` of a tiny MoE on free ports, model and images under `work_dir`."""
    model = work_dir / "tiny-moe"
    if not (model / CONFIG_FILE).exists():
        write_model(model)
    return demo_config(
        work_dir,
        deployment,
        model={"path": str(model), "name": "tiny-moe"},
        engine={"kind": "vllm", "python": str(ENVIRONMENT / "bin" / "python"), "args": ARGS},
        scale={
            "initial_ranks": 1,
            "min_ranks": 1,
            "max_ranks": replicas,
            "restore_timeout_s": BOOT_TIMEOUT_S,
            "operation_timeout_s": 2 * BOOT_TIMEOUT_S,
            # All requests finish: vLLM draws other tokens for a seed if it starts in the middle.
            "drain_timeout_s": 30.0,
        },
        snapshot={"parked": {"enabled": False}},
        planner={"enabled": planner},
    )


def vllm_script(work_dir: Path) -> Script:
    """1 replica, 3 of them from images, and 1 again."""
    config = vllm_config(work_dir)
    joiners = Tier.IMAGE if config.snapshot.enabled else Tier.COLD
    acts = (
        Act("planner: at least 3 replicas", {"min_endpoint": 3}, 3, frozenset({joiners})),
        Act("planner: a budget of 1 GPU", {"min_endpoint": 1, "max_gpu_budget": 1}, 1, frozenset()),
    )
    return Script(config, short_prompts(), CLIENTS, acts, cold_before_load=True)


def short_prompts() -> list[Prompt]:
    """Prompts with fixed seeds, none so long that a drain waits for it."""
    return [Prompt(known_words(n), 100 + n, 24 + 8 * (n % 4)) for n in range(8)]


def known_words(number: int, count: int = 6) -> str:
    """Words of the model's vocabulary, another choice for each of the first 64 numbers."""
    known = words(TINY_SHAPE.vocab_size)[len(SPECIAL) :]
    return " ".join(known[(number * 37 + k * k * 11) % len(known)] for k in range(count))
