"""dynamo/vllm_elastic.py where there is no GPU: `python detached_dynamo.py CONTROL_DIR FLAGS`."""

from __future__ import annotations

import importlib

from dynamo_elastic.dynamo import vllm_elastic

importlib.import_module("cpu_kernels")  # in the spawned processes too

if __name__ == "__main__":
    importlib.import_module("detached_cpu")  # before its flags are read
    vllm_elastic.main()
