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
from collections.abc import Callable, Sequence
from pathlib import Path

Step = tuple[float, tuple[str, ...]]
"""Seconds that a command may take, and its words."""
_TOOL = Path(__file__).with_name("vllm_elastic.py")
_SHAPE = (
    *("--gpus", "1", "--layers", "4", "--clients", "2", "--tokens", "64", "--settle-s", "2"),
    *("--serve-s", "2", "--eplb-config.step_interval", "100000", "--enable-cumem-allocator"),
)
_PAIR = (*_SHAPE, "--gpu-memory-utilization", "0.12", "--kv-cache-memory-bytes", "2147483648")
_IMAGE = (*_SHAPE, "--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", "4294967296")


def steps(work: Path) -> list[Step]:
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


def play(text: str, steps: Callable[[Path], Sequence[Step]], work: Path) -> None:
    """The command line of a benchmark that is some commands of vllm_elastic.py: all are played,
    whatever becomes of them, but for the report."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=work)
    for timeout_s, words in steps(parser.parse_args().work):
        command = [sys.executable, str(_TOOL), *words]
        subprocess.run(command, timeout=timeout_s, check=words[0] == "report")


if __name__ == "__main__":
    play(__doc__, steps, Path("/tmp/vllm_elastic_shared"))
