"""`python -m dynamo_elastic.dynamo.vllm_main CONTROL_DIR FLAGS...`: one vLLM engine under Dynamo's
own worker, with the flags of `dynamo.vllm`. engine/launch.py builds the line.

Its children import this module too, under another name: so it imports next to nothing.
"""

from __future__ import annotations

import os
import sys

DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Environment of an engine, where its agent's says nothing else: one host, few threads, no helper
processes of a compiler, and the same hash of a prefix in every process."""


def main() -> None:
    """Run the engine; never returns."""
    control_dir, *argv = sys.argv[1:]
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Sockets between the engine's processes: the one directory that every copy has for itself.
        "VLLM_RPC_BASE_PATH": control_dir,
    }
    from dynamo_elastic.dynamo.vllm_worker import run

    run(control_dir, argv)


if __name__ == "__main__":
    main()
