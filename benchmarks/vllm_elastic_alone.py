"""One rank of vLLM, its image, and the same rank again, on one GPU and without a group.

    python benchmarks/vllm_elastic_alone.py run --run-id A --layers 48
    python benchmarks/vllm_elastic_alone.py run --run-id B --layers 2 --keep-weights

Boots a rank of a group of two without the group, takes its image, ends it, and restores it twice.
Each time its memory is mapped, an expert buffer made, its graphs are rebound, and it generates;
then it lets go, is parked and brought back, and does the same again. With `--keep-weights` they are
in the image, and it must generate what it did before. As root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ANSWER = "alone.json"
_TIMEOUT_S = 90.0
_KEEP = "BENCH_KEEP_WEIGHTS"
_RANK = "rank"


async def _live(control_dir: Path, argv: list[str], began_s: float) -> None:
    """The rank's own process: from its boot on it waits for an identity, answers, and lets go,
    again and again."""
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    from dynamo_elastic.engine.vllm.replica import Replica
    from dynamo_elastic.engine.vllm.v0_33.front import live_detached, rest
    from dynamo_elastic.engine.vllm.v0_33.serve import parsed_flags

    async with build_async_engine_client(parsed_flags(argv)) as engine:
        await live_detached(engine, control_dir, began_s)
        while True:
            since_s = time.monotonic()
            (said,) = await engine.collective_rpc("elastic_ep_execute", args=("rehearse",))
            tokens = await Replica(engine, control_dir).probe(timeout_s=_TIMEOUT_S)
            alive_s = round(time.monotonic() - since_s, 3)
            left = await engine.engine_core.call_utility_async("detach_elastic_ep")
            answer = {"rehearsed": said, "tokens": list(tokens), "alive_s": alive_s, "left": left}
            partial = control_dir / f"{_ANSWER}.partial"
            partial.write_text(json.dumps(answer))
            partial.rename(control_dir / _ANSWER)
            await rest(engine, control_dir, began_s)


def _be_rank(control_dir: str, argv: list[str]) -> None:
    from dynamo_elastic.engine.renew import adopt_standard_files
    from dynamo_elastic.engine.vllm.elastic.flags import detached_environment, elastic_flags

    began_s = time.monotonic()
    adopt_standard_files()
    os.environ |= detached_environment(control_dir)
    own = ["--worker-cls", "vllm_elastic_alone_worker.Worker"]
    asyncio.run(_live(Path(control_dir), [*elastic_flags(), *argv, *own], began_s))


_SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
_WAYS: tuple[tuple[str, dict[str, str], bool], ...] = (
    ("as it is", {}, False),
    ("each process starts anew", _SPAWN, False),
    ("each process starts anew, and only those with devices are frozen", _SPAWN, True),
)
"""Ways to make the image, tried in turn until it lives: name, environment, and whether a process
without the driver's devices is on no GPU, whatever the driver says."""


def run(arguments: argparse.Namespace) -> None:
    """All of it; prints a line of JSON after each step. Nothing is left of it."""
    from vllm_elastic_images import imaging, say, with_devices_only
    from vllm_elastic_ranks import IMAGED, OURS, Group, Setup, write_shape

    folder = (arguments.work / arguments.run_id).absolute()
    kept = {_KEEP: "1"} if arguments.keep_weights else {}
    setup = Setup(OURS, arguments.layers, 1, 2, arguments.port, 1, arguments.flags, 1, IMAGED)
    with imaging(folder) as made:
        write_shape(folder / "model", arguments.layers)
        made.program = (str(Path(__file__).absolute()), _RANK)
        group = Group(setup, folder, 1)
        for way, environment, strict in _WAYS:
            group.setup.environment = kept | environment
            if strict:
                made.images = with_devices_only(made.images)
            try:
                image = made.image_of(group, 1)
            except SystemExit as exc:
                say("no image", way=way, why=str(exc))
                continue
            say("image", way=way, keeps_weights=bool(kept), **image)
            if all(_lives(made, group, image["engine"]["probe"], arguments.lives)):
                return
            made.forget(1)
    raise SystemExit("no rank came back from its image")


def _lives(made: Any, group: Any, probe: list[int], count: int) -> Iterator[bool]:
    """Whether the first steps of each life went well."""
    from vllm_elastic_images import say

    for number in range(count):
        went = True
        for step in _life(made, group):
            same = step.get("tokens") == probe
            say("life", number=number, same_tokens=same, **step)
            went = went and "failed" not in step
        if 1 in group.pids:
            made.end(group, 1)
        yield went


def _life(made: Any, group: Any) -> Iterator[dict[str, Any]]:
    """From the image until it has let go; then parked, and back."""
    from vllm_elastic_images import parked_and_back

    from dynamo_elastic.errors import ElasticError
    from dynamo_elastic.snapshot.process import identify

    step: dict[str, Any] = {"after": "its image"}
    try:
        step |= made.wake(group, 1)
        yield step | _answer(made, group)
        step = {"after": "parking"}
        process = identify(group.pids[1])
        if process is not None:
            step |= parked_and_back(process, made.images.gpu)
            made.identify(group, 1)
            yield step | _answer(made, group)
    except ElasticError as exc:
        yield step | {"failed": f"{type(exc).__name__}: {exc}"[:4000], "log": made.log_tails()}


def _answer(made: Any, group: Any) -> dict[str, Any]:
    """What the rank said of its new life; it has let go then. Raises EngineError."""
    from dynamo_elastic.engine.base import DETACHED_FILE
    from dynamo_elastic.errors import EngineError
    from dynamo_elastic.snapshot.process import identify

    answer, detached = (made.control_dir(1) / name for name in (_ANSWER, DETACHED_FILE))
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not (answer.exists() and detached.exists()):
        if identify(group.pids[1]) is None or time.monotonic() > deadline_s:
            raise EngineError("it did not answer")
        time.sleep(0.01)
    said: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    detached.unlink()
    return said


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
