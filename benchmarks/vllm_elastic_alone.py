"""One rank of vLLM, its image, and the same rank again, on one GPU and without a group.

    python benchmarks/vllm_elastic_alone.py run --run-id A --layers 48
    python benchmarks/vllm_elastic_alone.py run --run-id B --layers 2 --keep-weights

Boots a rank of a group of two without the group, takes its image, ends it, and restores it twice.
Each time its memory is mapped, an expert buffer made, its graphs are rebound, and it generates.
With `--keep-weights` they are in the image, and it must generate what it did before. As root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_ANSWER = "alone.json"
_TIMEOUT_S = 90.0
_KEEP = "BENCH_KEEP_WEIGHTS"
_RANK = "rank"


async def _live(control_dir: Path, argv: list[str], began_s: float) -> None:
    """The rank's own process: from its boot to its answer in its next life."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    from dynamo_elastic.engine.vllm.replica import Replica
    from dynamo_elastic.engine.vllm.v0_33.front import live_detached
    from dynamo_elastic.engine.vllm.v0_33.serve import parsed_flags

    async with build_async_engine_client(parsed_flags(argv)) as engine:
        await live_detached(engine, control_dir, began_s)
        since_s = time.monotonic()
        (said,) = await engine.collective_rpc("elastic_ep_execute", args=("rehearse",))
        tokens = await Replica(engine, control_dir).probe(timeout_s=_TIMEOUT_S)
        alive_s = round(time.monotonic() - since_s, 3)
        answer = {"rehearsed": said, "tokens": list(tokens), "alive_s": alive_s}
        partial = control_dir / f"{_ANSWER}.partial"
        partial.write_text(json.dumps(answer))
        partial.rename(control_dir / _ANSWER)
        await asyncio.sleep(_TIMEOUT_S)  # until it is ended


def _be_rank(control_dir: str, argv: list[str]) -> None:
    from dynamo_elastic.engine.renew import adopt_standard_files
    from dynamo_elastic.engine.vllm.elastic.flags import detached_environment, elastic_flags

    began_s = time.monotonic()
    adopt_standard_files()
    os.environ |= detached_environment(control_dir)
    own = ["--worker-cls", "vllm_elastic_alone_worker.Worker"]
    asyncio.run(_live(Path(control_dir), [*elastic_flags(), *argv, *own], began_s))


def run(arguments: argparse.Namespace) -> None:
    """All of it; prints a line of JSON after each step. Nothing is left of it."""
    from vllm_elastic_images import imaging, say
    from vllm_elastic_ranks import IMAGED, OURS, Group, Setup, write_shape

    folder = (arguments.work / arguments.run_id).absolute()
    environment = {_KEEP: "1"} if arguments.keep_weights else {}
    setup = Setup(
        OURS, arguments.layers, 1, 2, arguments.port, 1, arguments.flags, 1, IMAGED, environment
    )
    with imaging(folder) as made:
        write_shape(folder / "model", arguments.layers)
        made.program = (str(Path(__file__).absolute()), _RANK)
        group = Group(setup, folder, 1)
        image = made.image_of(group, 1)
        say("image", **image)
        for number in range(arguments.lives):
            found = _one_life(made, group)
            same = found.get("tokens") == image["engine"]["probe"]
            kept = arguments.keep_weights
            say("life", number=number, same_tokens=same, keeps_weights=kept, **found)
            group.end([1])


def _one_life(made: Any, group: Any) -> dict[str, Any]:
    from dynamo_elastic.errors import ElasticError
    from dynamo_elastic.snapshot.process import identify

    answer = made.control_dir(1) / _ANSWER
    answer.unlink(missing_ok=True)
    try:
        found: dict[str, Any] = made.wake(group, 1)
    except ElasticError as exc:
        return {"failed": f"{type(exc).__name__}: {exc}"[:4000], "log": made.log_tails()}
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not answer.exists():
        if identify(group.pids[1]) is None or time.monotonic() > deadline_s:
            return found | {"failed": "it did not answer", "log": made.log_tails()}
        time.sleep(0.01)
    said: dict[str, Any] = json.loads(answer.read_text())
    return found | said


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        _be_rank(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All that is not named here goes to vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("run",))
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--keep-weights", action="store_true")
    parser.add_argument("--lives", type=int, default=2)
    parser.add_argument("--port", type=int, default=8130)
    parser.add_argument("--work", type=Path, default=Path(".demo/vllm_elastic"))
    arguments, flags = parser.parse_known_args()
    arguments.flags = flags
    run(arguments)


if __name__ == "__main__":
    main()
