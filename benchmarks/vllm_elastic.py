"""vLLM's elastic expert parallelism, upstream's and ours: same flags, shape, clients and meter.

    python benchmarks/vllm_elastic.py run --run-id A --engine upstream --widths 2,4,2
    python benchmarks/vllm_elastic.py run --run-id A --engine ours --widths 4,2,4 --leavers parked
    python benchmarks/vllm_elastic.py run --run-id C --engine ours --widths 2,1,2 --leavers image
    python benchmarks/vllm_elastic.py rounds --run-id A --engine ours --widths 2,3,4,2,4
    python benchmarks/vllm_elastic.py faults --run-id A --engine ours --widths 2,3
    python benchmarks/vllm_elastic.py ramp --run-id A --engine ours --widths 2,4
    python benchmarks/vllm_elastic.py report --run-id A

`run` is `start`, `scale` through the widths, and `stop`. `rounds`, `faults` and `ramp` go on with
the group that is there, or start one; with --keep they leave it to the next command, else nobody
is left. No command takes longer than --deadline-s: its group is ended then. What was measured is
written as it comes to WORK/RUN_ID/ENGINE/measured.json; `report` joins both engines into one
result. vLLM starts no group of one rank, and can't scale down to one; ours can. With fewer GPUs
than ranks, ranks share them, and the times are good for comparing one engine with the other alone.
With `--leavers image`, as root and in one command, who joins comes from an image of a rank that
booted without a group.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import vllm_elastic_result
from vllm_elastic_commands import FAULTS, Commands
from vllm_elastic_faults import Fault
from vllm_elastic_ramp import Mode
from vllm_elastic_ranks import ENDED, IMAGED, OURS, UPSTREAM
from vllm_elastic_tiers import TIERS

_PORTS = {UPSTREAM: (8130, 13345), OURS: (8230, 13445)}
"""Of the first rank's API and of the group's handshakes: both groups may be there at once."""


def _widths(text: str) -> list[int]:
    widths = [int(word) for word in text.split(",")]
    if min(widths) < 1:
        raise argparse.ArgumentTypeError("a group has a rank at least")
    return widths


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All that is not named here goes to vLLM.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("command", choices=[*Commands.names(), "report"])
    add("--run-id", required=True, help="joins commands and engines")
    add("--engine", choices=(UPSTREAM, OURS), default=UPSTREAM)
    add("--widths", type=_widths, default=[2, 4, 2], help="run, start: the first one to boot")
    add("--boot", type=int, default=0, help="rounds, faults, ramp: ranks to boot with")
    add("--floor", type=int, default=0, help="fewest ranks ever; default: the smallest width")
    add("--max-ranks", type=int, default=0, help="default: the largest width")
    add("--gpus", type=int, default=4)
    add("--layers", type=int, default=48)
    add("--clients", type=int, default=4, help="at each rank that stays")
    add("--tokens", type=int, default=256, help="of one request")
    add("--leavers", choices=sorted(TIERS), default=ENDED, help="ours: those who leave")
    add("--setting", action="append", default=[], help="ours: NAME=VALUE in its environment")
    add("--serve-s", type=float, default=4.0, help="under load at each width")
    add("--settle-s", type=float, default=3.0, help="under load before an operation, and after")
    add("--scale-timeout-s", type=float, default=300.0)
    add("--joiner-timeout-s", type=float, default=30.0, help="for a rank that was there before")
    add("--start-timeout-s", type=float, default=330)
    add("--deadline-s", type=float, default=540, help="of this command")
    add("--keep", action="store_true", help="rounds, faults, ramp: the group goes on")
    add("--rounds", type=int, default=10)
    add("--prompts", type=int, default=256, help="rounds: scored before, between and after")
    add("--fault", type=Fault, choices=list(Fault), action="append", default=[])
    add("--fault-after-s", type=float, default=0.5, help="where a fault is not at once")
    add("--lower", action="store_true", help="faults: the next with one rank less; nobody boots")
    add("--watch-s", type=float, default=10.0, help="after a fault")
    add("--mode", type=Mode, choices=list(Mode), action="append", default=[])
    add("--trace-s", type=float, default=240.0, help="in which the rate doubles")
    add("--rate", type=float, default=0.0, help="requests a second at first; 0: as it is found")
    add("--port", type=int, default=0)
    add("--rpc-port", type=int, default=0)
    add("--work", type=Path, default=Path(".demo/vllm_elastic"))
    return parser


def _arguments() -> argparse.Namespace:
    parser = _parser()
    arguments, flags = parser.parse_known_args()
    arguments.flags = flags
    port, rpc_port = _PORTS[arguments.engine]
    arguments.port = arguments.port or port
    arguments.rpc_port = arguments.rpc_port or rpc_port
    booted = arguments.command in ("run", "start")
    if booted and arguments.widths[0] < 2:
        parser.error("vLLM 0.33 starts no external-load-balancer group below 2 ranks")
    if arguments.leavers == IMAGED and (arguments.keep or arguments.command in ("start", "scale")):
        parser.error("images and the group are in a namespace that ends with its command")
    faults = len(arguments.fault) or len(FAULTS[arguments.engine])
    if arguments.lower and arguments.widths[0] < faults:
        parser.error("--lower takes a rank away for each fault: begin with as many")
    if arguments.engine == UPSTREAM and (min(arguments.widths) < 2 or arguments.leavers != ENDED):
        parser.error("upstream has no group below 2 ranks, and its leavers end")
    return arguments


def main() -> None:
    arguments = _arguments()
    root = arguments.work / arguments.run_id
    if arguments.command == "report":
        print(vllm_elastic_result.write(root))
    else:
        asyncio.run(Commands(arguments, root / arguments.engine).do())


if __name__ == "__main__":
    main()
