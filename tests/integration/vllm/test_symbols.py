"""Every module and symbol of Dynamo and vLLM that we wrap is there, in the engine's environment."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

import dynamo_elastic
from dynamo_elastic.demo.vllm import ENVIRONMENT

pytestmark = pytest.mark.vllm

PACKAGE = Path(dynamo_elastic.__file__).parent
FOREIGN = ("dynamo", "vllm")

USED = {
    "dynamo.vllm.main": [
        "parse_args_with_model_fetch",
        "prepare_snapshot_engine",
        "refresh_snapshot_restore_config",
        "register_model",
        "setup_vllm_engine",
        "worker",
    ],
    "dynamo.vllm.worker_factory": ["DecodeWorkerHandler", "FPM_SET_WORKER_ID_METHOD_NAME"],
    "dynamo.vllm.instrumented_scheduler": ["_FpmPublisherThread", "ENV_FPM_PORT"],
    "dynamo.vllm.instrumented_scheduler:InstrumentedScheduler": ["_resolve_dp_rank", "shutdown"],
    "dynamo.vllm.instrumented_scheduler:_FpmPublisherThread": ["shutdown", "publish"],
    "dynamo.vllm.handlers:VllmEnginePauseController": ["pause", "resume", "mark_resumed"],
    "dynamo.llm:ModelRuntimeConfig": ["set_engine_specific"],
    "dynamo.runtime:Endpoint": ["register_endpoint_instance", "unregister_endpoint_instance"],
    "vllm.v1.engine.async_llm:AsyncLLM": [
        "abort",
        "checkpoint_prepare",
        "checkpoint_restore",
        "collective_rpc",
        "generate",
        "pause_generation",
        "resume_generation",
    ],
    "vllm.v1.engine.core:EngineCore": ["set_fpm_worker_id", "pause_scheduler"],
    "vllm.v1.engine.output_processor:OutputProcessor": ["abort_requests"],
    "vllm.distributed.kv_events:EventPublisherFactory": ["create"],
    "vllm.distributed.kv_events:EventPublisher": ["get_publisher_config", "shutdown"],
}
"""Module, or module:class, and what we call, replace or subclass there beyond what we import."""

CHECK = """
import importlib, json, sys
from dynamo_elastic.engine.vllm.shims import apply_shims
apply_shims()
missing = []
for place, names in json.loads(sys.argv[1]):
    module, _, kind = place.partition(":")
    try:
        found = importlib.import_module(module)
        found = getattr(found, kind) if kind else found
    except Exception as exc:
        missing.append(f"{place}: {exc!r}")
        continue
    for name in names:
        if not hasattr(found, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                missing.append(f"{place}.{name}")
for module in json.loads(sys.argv[2]):
    importlib.import_module(module)
print(json.dumps(missing))
"""


def imported_by(path: Path) -> list[tuple[str, list[str]]]:
    """What a module of ours imports of Dynamo and vLLM."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            found.append((str(node.module), [alias.name for alias in node.names]))
    return found


def ours() -> list[Path]:
    """Our modules that run in an engine."""
    return [*PACKAGE.glob("dynamo/vllm_*.py"), *PACKAGE.glob("engine/vllm/*.py")]


@pytest.mark.timeout(300)
def test_everything_that_we_wrap_is_there() -> None:
    wanted = [pair for path in ours() for pair in imported_by(path)] + list(USED.items())
    assert ("dynamo.vllm", ["main"]) in wanted, "the search finds nothing"
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in ours()
        if path.name != "__init__.py"
    ]
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-c", CHECK, json.dumps(wanted), json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
