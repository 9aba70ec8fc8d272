"""A rank of a tiny model that boots without a group on the CPU: its environment and command line.
What stands in for a GPU is in tests/integration/vllm/detached_cpu.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from dynamo_elastic.engine.vllm.elastic.flags import detached_environment
from dynamo_elastic.testing.vllm_ranks import PYTHON, ROOT

STAND_INS = ROOT / "tests" / "integration" / "vllm"
RANK = 3
"""It boots as the last rank of the largest group."""
CONTROL_DIR, _MODEL = "c", "model"


def rank_environment(folder: Path) -> dict[str, str]:
    """Of a rank whose model, caches and control directory are in `folder`, where the model is."""
    found = {
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{STAND_INS}:{ROOT}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **detached_environment(str(folder / CONTROL_DIR)),
    }
    make = [str(PYTHON), "-m", "dynamo_elastic.engine.vllm.make_model", str(folder / _MODEL)]
    subprocess.run(make, env=found, check=True, timeout=200)
    return found


def server_argv(folder: Path) -> list[str]:
    """The command that starts it behind vLLM's own server."""
    return [
        *(str(PYTHON), str(STAND_INS / "detached_serve.py"), str(folder / CONTROL_DIR)),
        *(str(folder / _MODEL), "--host", "127.0.0.1", *_flags()),
    ]


def dynamo_argv(folder: Path) -> list[str]:
    """The command that starts it as Dynamo's worker."""
    return [
        *(str(PYTHON), str(STAND_INS / "detached_dynamo.py"), str(folder / CONTROL_DIR)),
        *("--model", str(folder / _MODEL), *_flags()),
    ]


def _flags() -> list[str]:
    values = {
        "--served-model-name": "m",
        "--max-model-len": 256,
        "--max-num-seqs": 8,
        "--kv-cache-memory-bytes": 64 << 20,
        "--data-parallel-size": RANK + 1,
        "--data-parallel-rank": RANK,
        "--data-parallel-address": "127.0.0.1",
        "--data-parallel-rpc-port": 1,
        "--elastic-ep-max-dp-size": RANK + 1,
        "--eplb-config": json.dumps({"num_redundant_experts": 0, "use_async": False}),
        "--distributed-executor-backend": "detached_cpu.Executor",
        "--worker-cls": "detached_cpu.Worker",
    }
    switches = ["enforce-eager", "enable-expert-parallel", "enable-elastic-ep", "enable-eplb"]
    return [*(str(w) for pair in values.items() for w in pair), *(f"--{name}" for name in switches)]
