"""One rank of vLLM, its image, and the same rank again, on one GPU and without a group.

    python benchmarks/vllm_elastic_alone.py run --run-id A --layers 48
    python benchmarks/vllm_elastic_alone.py run --run-id B --layers 2 --keep-weights
    python benchmarks/vllm_elastic_alone.py report --run-id A,B

Boots a rank of a group of two without the group, takes its image, ends it, and restores it twice.
Each time its memory is mapped, an expert buffer made, its graphs are rebound, and it generates;
then it lets go, is parked and brought back, and does the same again. With `--keep-weights` they are
in the image, and it must generate what it did before; without, nobody is there to send them. As
root. `report` makes one result of runs of both kinds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_ANSWER, _STEPS = "alone.json", "steps.json"
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
            scores = await _logprobs(engine) if os.environ.get(_KEEP) else []
            left = await engine.engine_core.call_utility_async("detach_elastic_ep")
            answer = {"rehearsed": said, "tokens": list(tokens), "alive_s": alive_s, "left": left}
            answer["logprobs"] = scores
            partial = control_dir / f"{_ANSWER}.partial"
            partial.write_text(json.dumps(answer))
            partial.rename(control_dir / _ANSWER)
            await rest(engine, control_dir, began_s)


async def _logprobs(engine: Any) -> list[float]:
    """Of greedy tokens after a few prompts: they tell of every weight, as the tokens of a model
    with dummy weights do not."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    found: list[float] = []
    for number in range(4):
        prompt = {"prompt_token_ids": [5, 6, 7, 8, 20 + number]}
        async for output in engine.generate(prompt, params, f"score-{time.monotonic()}"):
            last = output
        steps = zip(last.outputs[0].token_ids, last.outputs[0].logprobs, strict=True)
        found += [step[token].logprob for token, step in steps]
    return found


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
    from vllm_elastic_images import imaging
    from vllm_elastic_ranks import IMAGED, OURS, Group, Setup, write_shape

    steps: list[dict[str, Any]] = []

    def say(step: str, **values: Any) -> None:
        steps.append(json.loads(json.dumps({"step": step, **values}, default=str)))
        (folder / _STEPS).write_text(json.dumps(steps, indent=1) + "\n")
        print(json.dumps(steps[-1]), flush=True)

    folder = (arguments.work / arguments.run_id).absolute()
    kept = {_KEEP: "1"} if arguments.keep_weights else {}
    setup = Setup(OURS, arguments.layers, 1, 2, arguments.port, 1, arguments.flags, 1, IMAGED, kept)
    with imaging(folder) as made:
        write_shape(folder / "model", arguments.layers)
        made.program = (str(Path(__file__).absolute()), _RANK)
        group = Group(setup, folder, 1)
        image = made.image_of(group, 1)
        first: list[float] = []
        say("image", keeps_weights=bool(kept), layers=arguments.layers, **image)
        for number in range(arguments.lives):
            for step in _life(made, group):
                same = step.get("tokens") == image["engine"]["probe"]
                scores = step.pop("logprobs", [])
                first = first or scores
                apart = max((abs(a - b) for a, b in zip(first, scores, strict=False)), default=None)
                say("life", number=number, same_tokens=same, logprobs_apart=apart, **step)
            made.end(group, 1)


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


def metrics_of(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """The worst of all lives: times and sizes of runs without weights, tokens of those with."""
    metrics: dict[str, float] = {}

    def worst(name: str, value: float) -> None:
        metrics[name] = max(value, metrics.get(name, value))

    for steps in runs:
        image = next(step for step in steps if step["step"] == "image")
        lives = [step for step in steps if step["step"] == "life"]
        worst("lives_failed", sum("failed" in life for life in lives))
        if image["keeps_weights"]:
            metrics["lives_with_weights"] = len(lives)
            metrics["same_tokens"] = sum(life["same_tokens"] for life in lives)
            for apart in (life.get("logprobs_apart") for life in lives):
                if apart is not None:
                    worst("logprobs_apart", apart)
            continue
        left, times = image["engine"]["left"], image["timings_s"]
        for name in ("graphs", "nodes", "unmapped_bytes", "kept_bytes"):
            metrics[name] = left[name]
        metrics |= {"image_bytes": image["image_bytes"], "boot_s": times["boot"]}
        metrics |= {"freeze_s": times["freeze"], "dump_s": times["dump"]}
        for life in (life for life in lives if "failed" not in life):
            for name, value in _times(life).items():
                worst(name, value)
    return metrics


def _times(life: Mapping[str, Any]) -> dict[str, float]:
    if life["after"] != "its image":
        own = {name: life[name] for name in ("park_s", "unpark_s", "parked_host_bytes")}
        return own | {"parked_alive_s": life["alive_s"]}
    parts, came = life["rehearsed"]["seconds"], life["parts"]
    return {
        "image_restore_s": life["restored_s"],
        "criu_s": came["restore"],
        "cuda_s": came["thaw"],
        "verify_s": came["verify"],
        "alive_s": life["alive_s"],
        **{f"{name}_s": parts[name] for name in ("memory", "buffer", "rebind")},
    }


def report(arguments: argparse.Namespace) -> None:
    """One result of all those runs."""
    from provenance import write_result

    runs = {
        name: json.loads((arguments.work / name / _STEPS).read_text())
        for name in arguments.run_id.split(",")
    }
    print(write_result("vllm_elastic_alone", metrics_of(list(runs.values())), runs))


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
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--keep-weights", action="store_true")
    parser.add_argument("--lives", type=int, default=2)
    parser.add_argument("--port", type=int, default=8130)
    parser.add_argument("--work", type=Path, default=Path(".demo/vllm_elastic"))
    arguments, flags = parser.parse_known_args()
    arguments.flags = flags
    (run if arguments.command == "run" else report)(arguments)


if __name__ == "__main__":
    main()
