"""How a `vllm serve` or `dynamo.vllm` becomes one of ours: two flags and an environment. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_elastic.engine.vllm.elastic.settings import PREFIX

ADAPTER = "dynamo_elastic.engine.vllm.v0_33"
EXECUTOR = f"{ADAPTER}.executor.ElasticExecutor"
WORKER = f"{ADAPTER}.worker.ElasticWorker"
FOUNDS_VARIABLE = "DYNAMO_ELASTIC_FOUNDS"
"""Of how many ranks the group is that a founder boots in; 0 or nothing: it boots without one."""


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
    processes are in the one directory that every copy of its image has for itself. Its worker
    starts anew: one that vLLM forked dies at its first call of CUDA after an image."""
    return elastic_environment(park=True) | {
        f"{PREFIX}DETACHED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": control_dir,
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in the group that it boots for."""

    rank: int
    size: int
    max_ranks: int
    slots_per_rank: int
    num_experts: int
    rpc_port: int


def group_flags(seat: Seat) -> list[str]:
    """What makes vLLM's elastic expert parallelism of one process tree a rank, on one host."""
    redundant = seat.slots_per_rank * seat.size - seat.num_experts
    values = {
        "--all2all-backend": "nixl_ep",
        "--data-parallel-address": "127.0.0.1",
        "--data-parallel-rank": seat.rank,
        "--data-parallel-rpc-port": seat.rpc_port,
        "--data-parallel-size": seat.size,
        "--elastic-ep-max-dp-size": seat.max_ranks,
        "--eplb-config.num_redundant_experts": redundant,
    }
    switches = [
        "--enable-cumem-allocator",  # or a rank that leaves could not unmap its memory
        "--enable-elastic-ep",
        "--enable-eplb",
        "--enable-expert-parallel",
    ]
    return [word for flag, value in values.items() for word in (flag, str(value))] + switches
