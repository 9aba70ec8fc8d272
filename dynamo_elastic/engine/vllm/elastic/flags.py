"""How a `vllm serve` or `dynamo.vllm` becomes one of ours: two flags and an environment. Pure."""

from __future__ import annotations

from dynamo_elastic.engine.vllm.elastic.settings import PREFIX

ADAPTER = "dynamo_elastic.engine.vllm.v0_33"
EXECUTOR = f"{ADAPTER}.executor.ElasticExecutor"
WORKER = f"{ADAPTER}.worker.ElasticWorker"


def elastic_flags() -> list[str]:
    """Flags that every rank of a group needs. The executor's module is imported in the API process
    and in the engine core before either looks up the classes that we replace; the worker's in the
    worker."""
    return ["--distributed-executor-backend", EXECUTOR, "--worker-cls", WORKER]


def elastic_environment(*, park: bool = False) -> dict[str, str]:
    """UCX must not keep mappings of a peer's memory: a rank that holds one can't be parked. And
    whoever parks it reads that in its environment, over which vLLM would write its title."""
    found = {"UCX_CUDA_IPC_CACHE": "n", "UCX_MEM_MMAP_HOOK_MODE": "none", "SPT_NOENV": "1"}
    return found | ({f"{PREFIX}PARK_LEAVERS": "1"} if park else {})


def detached_environment(control_dir: str) -> dict[str, str]:
    """What a rank that boots without a group needs before it imports vLLM. Sockets between its
    processes are in the one directory that every copy of its image has for itself."""
    return elastic_environment(park=True) | {
        f"{PREFIX}DETACHED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": control_dir,
    }
