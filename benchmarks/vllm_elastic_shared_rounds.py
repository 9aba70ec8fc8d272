"""One GPU: ranks of vLLM that leave and come back, again and again, with all ranks on the one GPU.

    python benchmarks/vllm_elastic_shared_rounds.py            # about 9 minutes

Seven ranks boot once. They go 2 -> 3 -> 4 -> 2 -> 4 under load for as long as the time allows, with
256 prompts scored after each round; experts begin to move five steps after each scale-up, so that
the next resize finds them on their way. Then a joiner is killed or stopped at four stages, and once
when it has come to serve, each time with one rank less, so that nobody boots again. Who leaves is
kept alive as it is: a rank that the driver has restored must not share a GPU with others
(docs/findings.md, section 16).
"""

from __future__ import annotations

from pathlib import Path

from vllm_elastic_shared import Step, play

_GROUP = (
    *("--engine", "ours", "--leavers", "kept", "--gpus", "1", "--layers", "4"),
    *("--clients", "2", "--tokens", "64", "--settle-s", "1", "--serve-s", "1"),
    *("--max-ranks", "7", "--floor", "1"),
    *("--setting", "DYNAMO_ELASTIC_VLLM_REBALANCE_AFTER_STEPS=5"),
    *("--eplb-config.step_interval", "100000", "--enable-cumem-allocator"),
    *("--gpu-memory-utilization", "0.12", "--kv-cache-memory-bytes", "1073741824"),
)


_FAULTS = (
    "joiner-killed-restored",
    "joiner-killed-in-stream",
    "joiner-killed-ready",
    "joiner-stopped-in-stream",
    "joiner-killed-serving",
)


def steps(work: Path) -> list[Step]:
    """Commands in their order, each with the seconds that it may take."""
    run = ("--run-id", "kept", "--work", str(work))
    patience = ("--joiner-timeout-s", "15", "--scale-timeout-s", "60")
    rounds = ("--boot", "7", "--widths", "2,3,4,2,4", "--rounds", "10", "--deadline-s", "345")
    haste = ("--joiner-timeout-s", "5", "--scale-timeout-s", "40")
    faults = [word for fault in _FAULTS for word in ("--fault", fault)]
    lower = ("--widths", "6,7", "--lower", "--watch-s", "4", "--deadline-s", "195")
    return [
        (370, ("rounds", *run, *_GROUP, *patience, *rounds, "--keep")),
        (210, ("faults", *run, *_GROUP, *haste, *lower, *faults)),
        (60, ("report", *run)),
    ]


if __name__ == "__main__":
    play(__doc__, steps, Path("/tmp/vllm_elastic_shared_rounds"))
