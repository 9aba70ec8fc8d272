"""dynamo/vllm_elastic.py where there is no GPU, in a whole deployment: `python group_dynamo.py
CONTROL_DIR FLAGS`, with the flags and the environment that an agent gives it."""

from __future__ import annotations

import importlib
import os
import sys

from dynamo_elastic.dynamo import vllm_elastic
from dynamo_elastic.engine.vllm.elastic.flags import (
    FOUNDS_VARIABLE,
    detached_environment,
    elastic_environment,
)

_NOT_HERE = ("--enable-cumem-allocator",)
_OURS = (
    "--enforce-eager",
    "--all2all-backend=allgather_reducescatter",  # vLLM has CPU kernels for no other
    "--eplb-config.use_async=false",
    "--distributed-executor-backend=group_cpu.Executor",
    "--worker-cls=group_cpu.Worker",
)

importlib.import_module("cpu_kernels")  # in the spawned processes too

if __name__ == "__main__":
    founds = FOUNDS_VARIABLE in os.environ
    own = elastic_environment(park=True) if founds else detached_environment(sys.argv[1])
    os.environ |= own  # before vLLM is imported
    sys.argv = [word for word in sys.argv if word not in _NOT_HERE] + list(_OURS)
    importlib.import_module("group_cpu")
    vllm_elastic.main()
