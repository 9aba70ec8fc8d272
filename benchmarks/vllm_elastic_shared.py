"""One GPU: vLLM's elastic expert parallelism, upstream's and ours, with all ranks on the one GPU.

    python benchmarks/vllm_elastic_shared.py            # about 6 minutes

Upstream goes 2 -> 3 -> 2, ours 3 -> 2 -> 3 with the leaver parked, and 2 -> 1 -> 2 with a joiner
from an image: four layers, clients, meter and flags as in vllm_elastic.py. Ranks take turns on the
GPU, so a time says only how the two compare; and a rank that the driver has brought back does not
step beside others that wait for it inside kernels (docs/findings.md, section 16), which shows here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

_TOOL = Path(__file__).with_name("vllm_elastic.py")
_SHAPE = (
    *("--gpus", "1", "--layers", "4", "--clients", "2", "--tokens", "64", "--settle-s", "2"),
    *("--serve-s", "2", "--eplb-config.step_interval", "100000", "--enable-cumem-allocator"),
)
_PAIR = (*_SHAPE, "--gpu-memory-utilization", "0.12", "--kv-cache-memory-bytes", "2147483648")
_IMAGE = (*_SHAPE, "--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", "4294967296")


def steps(work: Path) -> list[tuple[float, tuple[str, ...]]]:
    """Commands in their order, each with the seconds that it may take."""
    pair = ("--run-id", "pair", "--work", str(work))
    ours, upstream = ("--engine", "ours"), ("--engine", "upstream")
    parked = ("--leavers", "parked")
    image = ("--run-id", "image", "--work", str(work), *ours, "--leavers", "image")
    return [
        (330, ("run", *pair, *upstream, "--widths", "2,3,2", *_PAIR)),
        (280, ("run", *pair, *ours, "--widths", "3,2,3", *parked, *_PAIR)),
        (280, ("run", *image, "--widths", "2,1,2", *_IMAGE)),
        (60, ("report", *pair)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm_elastic_shared"))
    work = parser.parse_args().work
    for timeout_s, words in steps(work):
        command = [sys.executable, str(_TOOL), *words]
        subprocess.run(command, timeout=timeout_s, check=words[0] == "report")


if __name__ == "__main__":
    main()
