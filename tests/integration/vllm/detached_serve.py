"""v0_33/serve.py where there is no GPU: `python detached_serve.py CONTROL_DIR FLAGS...`."""

from __future__ import annotations

import importlib

from dynamo_elastic.engine.vllm.v0_33 import serve

importlib.import_module("cpu_kernels")  # in the spawned processes too

if __name__ == "__main__":
    importlib.import_module("detached_cpu")  # before its flags are read
    serve.main()
