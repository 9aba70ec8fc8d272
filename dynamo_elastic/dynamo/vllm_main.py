"""`python -m dynamo_elastic.dynamo.vllm_main CONTROL_DIR FLAGS...`: one vLLM engine under Dynamo's
own worker, with the flags of `dynamo.vllm`. engine/launch.py builds the line.

Its children import this module too, under another name: so it imports little.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dynamo_elastic.engine.vllm.versions import Standing, check_versions, installed
from dynamo_elastic.errors import ConfigError

DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "RES_OPTIONS": "timeout:1 attempts:3",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Environment of an engine, where its agent's says nothing else: one host, few threads, no helper
processes of a compiler, and the same hash of a prefix in every process. A name server is asked
again after 1 s, not 5: torch asks for names, which it needs for nothing, whenever ranks connect."""


def main() -> None:
    """Run the engine; never returns. Releases that were never tried end it before they are
    imported."""
    began_s = time.monotonic()
    control_dir, *argv = sys.argv[1:]
    python = Path(sys.executable)
    try:
        standing = check_versions(installed(python), python)
    except ConfigError as exc:
        sys.exit(f"engine: {exc}")
    if standing is not Standing.RUN:
        print(f"engine: these releases were {standing}", file=sys.stderr)  # noqa: T201
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Sockets between the engine's processes: the one directory that every copy has for itself.
        "VLLM_RPC_BASE_PATH": control_dir,
    }
    from dynamo_elastic.dynamo.vllm_worker import run

    run(Path(control_dir), argv, began_s)


if __name__ == "__main__":
    main()
