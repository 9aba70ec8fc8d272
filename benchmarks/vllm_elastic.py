"""vLLM's elastic expert parallelism, upstream's and ours: same flags, shape, clients and meter.

    python benchmarks/vllm_elastic.py run   --run-id A --engine upstream --widths 2,4,2
    python benchmarks/vllm_elastic.py run   --run-id A --engine ours     --widths 2,4,2
    python benchmarks/vllm_elastic.py run   --run-id B --engine ours --widths 2,1,2 --leavers parked
    python benchmarks/vllm_elastic.py run   --run-id C --engine ours --widths 2,1,2 --leavers image
    python benchmarks/vllm_elastic.py report --run-id A

`run` is start, scale for each width, and stop; each is a command of its own that goes on where the
last one ended, so that no command takes longer than nine minutes. What was measured is written as
it comes to WORK/RUN_ID/ENGINE/measured.json; `report` joins both engines into one result. vLLM
starts no group of one rank, and can't scale down to one; ours can. With fewer GPUs than ranks,
ranks share them, and the times are good for comparing one engine with the other alone. A rank that
left and was kept or parked comes back when the group grows; others are started, cold. With
`--leavers image`, as root and in one command, ranks that leave end, an image is made of a rank that
booted without a group, and those that join are restored from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from provenance import write_result
from vllm_elastic_meter import (
    Clients,
    encoded,
    first_token_s,
    logprobs,
    seen,
    worst_difference,
)
from vllm_elastic_ranks import (
    ENDED,
    IMAGED,
    KEPT,
    MODEL,
    OURS,
    PARKED,
    UPSTREAM,
    Group,
    Setup,
    alive,
    write_shape,
)

from dynamo_elastic.errors import ElasticError

_SETTLE_S = 3.0
"""Before a scale operation, for a first look at the gaps; and after it."""
_SCORED = {"prompts": 4, "tokens": 8}


class Measured:
    """Everything of one engine's run so far, in its file at all times."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "measured.json"
        self.steps: list[dict[str, Any]] = []
        if self._path.exists():
            self.steps = json.loads(self._path.read_text())

    def add(self, step: str, **values: Any) -> None:
        self.steps.append({"step": step, **values})
        self._path.write_text(encoded(self.steps))
        print(json.dumps(self.steps[-1], default=str), flush=True)

    def last(self, step: str) -> dict[str, Any]:
        return next((s for s in reversed(self.steps) if s["step"] == step), {})


async def start(
    arguments: argparse.Namespace, folder: Path, namespace: Any = None
) -> tuple[Group, Measured]:
    """Boot a group, cold, to its first width."""
    widths = arguments.widths
    most = max(arguments.max_ranks, *widths)
    setup = Setup(
        arguments.engine, arguments.layers, arguments.gpus, most,
        arguments.port, arguments.rpc_port, arguments.flags, min(widths), arguments.leavers,
        dict(word.split("=", 1) for word in arguments.setting),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_shape(folder / "model", arguments.layers)
    group = Group(setup, folder, widths[0], namespace=namespace)
    for rank in range(widths[0]):
        group.start(rank, widths[0], joins=False)
    up_s = await group.wait_up(range(widths[0]), arguments.start_timeout_s)
    measured = Measured(folder)
    measured.add("start", width=widths[0], cold_start_s=round(up_s, 1), setup=asdict(setup))
    await score(group, measured, f"started at {widths[0]}")
    return group, measured


async def score(group: Group, measured: Measured, when: str) -> None:
    """Log-probabilities of every rank, against the first ones that were measured."""
    first = measured.last("first score").get("logprobs")
    worst: dict[int, float | None] = {}
    for rank in range(group.width):
        found = await logprobs(partial(_ask, group, rank), MODEL, **_SCORED)
        if first is None and found:
            first = found
            measured.add("first score", logprobs=found)
        worst[rank] = worst_difference(first, found)
    measured.add("score", when=when, max_abs_err_by_rank=worst)


async def facts(group: Group, measured: Measured) -> None:
    """What our workers say of their hooks and graphs, while nothing is asked of them."""
    for method in ("elastic_facts", "elastic_rebind_check"):
        call = {"method": method, "timeout": 60}
        said = {r: await group.post(r, "/collective_rpc", call, 90) for r in range(group.width)}
        measured.add(method, ranks={rank: answer for rank, (_, answer) in said.items()})


async def _ask(group: Group, rank: int, body: Any) -> tuple[int, Any]:
    return await group.post(rank, "/v1/completions", body, 60)


async def scale(group: Group, measured: Measured, width: int, arguments: Any) -> bool:
    """Scale under load; False if a rank refused."""
    before = group.width
    stay = range(min(before, width))
    clients = Clients(group.url, MODEL, tokens=arguments.tokens)
    clients.start(stay, arguments.clients)
    await asyncio.sleep(_SETTLE_S)
    began_s = time.monotonic()
    joiners = asyncio.gather(
        *(_join(group, arguments, rank, width, began_s) for rank in range(before, width))
    )
    answers = await asyncio.gather(
        *(
            _scale_rank(group, rank, width, began_s, arguments.scale_timeout_s)
            for rank in range(before)
        )
    )
    joined = await joiners
    total_s = max(answer["answered_s"] for answer in answers)
    ok = all(answer["status"] == 200 for answer in answers)
    values: dict[str, Any] = {"from": before, "to": width, "ok": ok, "total_s": round(total_s, 3)}
    if ok:
        group.width = width
        group.save()
        values |= await _joiners(group, range(before, width))
    await asyncio.sleep(_SETTLE_S)
    await clients.stop()
    window = seen(clients.streams, began_s, began_s + total_s + 1.0)
    quiet = seen(clients.streams, began_s - _SETTLE_S + 1.0, began_s)
    measured.add(
        "scale", **values, ranks=answers, joiners=joined, seen=asdict(window),
        before=asdict(quiet),
    )  # fmt: skip
    if ok:
        await score(group, measured, f"after {before} -> {width}")
        await _serve(group, measured, arguments)
        await _see_off(group, measured, arguments, range(width, before))
    return ok


async def _serve(group: Group, measured: Measured, arguments: Any) -> None:
    """All ranks under load for a while: experts are rebalanced meanwhile."""
    clients = Clients(group.url, MODEL, tokens=arguments.tokens)
    began_s = time.monotonic()
    clients.start(range(group.width), arguments.clients)
    await asyncio.sleep(arguments.serve_s)
    ended_s = time.monotonic()
    await clients.stop()
    measured.add("serve", width=group.width, seen=asdict(seen(clients.streams, began_s, ended_s)))
    await score(group, measured, f"after serving at {group.width}")


async def _see_off(group: Group, measured: Measured, arguments: Any, leavers: range) -> None:
    """Ranks that have left are ended, kept, or parked."""
    if not leavers:
        return
    if arguments.leavers in (ENDED, IMAGED):
        group.end(leavers)
        return
    # They answer once they have let go of what their peers used.
    facts = {rank: (await group.post(rank, "/elastic_ep/facts", {}, 60))[1] for rank in leavers}
    measured.add("left", ranks=facts)
    if arguments.leavers == PARKED:
        pids = {rank: group.pids[rank] for rank in leavers}
        measured.add("park", ranks=await asyncio.to_thread(_parking().park, pids))


@cache
def _parking() -> Any:
    from vllm_elastic_park import Parking  # needs a GPU's driver

    return Parking()


async def _join(
    group: Group, arguments: Any, rank: int, width: int, began_s: float
) -> dict[str, Any]:
    """A rank that is still there comes back; another is restored or started. When it was ready, and
    what of the time went where."""
    if arguments.leavers == IMAGED:
        back = await _restored(group, arguments, rank)
        if "failed" in back:
            return {"rank": rank, "restore": back}
    elif rank not in group.pids or not alive(group.pids[rank]):
        group.start(rank, width, joins=True)
        return {"rank": rank, "cold": True}
    else:
        back = {}
    if arguments.leavers == PARKED:
        back = await asyncio.to_thread(_parking().bring_back, rank)
    restored_s = round(time.monotonic() - began_s, 3)
    status, parts = await group.post(rank, "/elastic_ep/attach", {}, arguments.scale_timeout_s)
    ready_s = round(time.monotonic() - began_s, 3)
    times = {"restored_s": restored_s, "ready_s": ready_s, "restore": back, "attach": parts}
    return {"rank": rank, "status": status, **times}


async def _restored(group: Group, arguments: Any, rank: int) -> dict[str, Any]:
    """Seconds by part of its way back from its image; if it did not come, nobody waits for it."""
    try:
        return await asyncio.to_thread(arguments.imaging.bring_back, group, rank)
    except (ElasticError, OSError) as exc:
        reason = f"{type(exc).__name__}: {exc}"[:2000]
        await group.post(0, "/elastic_ep/fail", {"reason": reason}, 10)
        return {"failed": reason}


async def _scale_rank(
    group: Group, rank: int, width: int, began_s: float, timeout_s: float
) -> dict[str, Any]:
    body = {"new_data_parallel_size": width}
    status, answer = await group.post(rank, "/scale_elastic_ep", body, timeout_s)
    said = "" if status == 200 else str(answer)[:300]
    answered_s = round(time.monotonic() - began_s, 3)
    return {"rank": rank, "status": status, "answered_s": answered_s, "said": said}


async def _joiners(group: Group, ranks: Sequence[int]) -> dict[str, Any]:
    """Ranks that have joined answer from now on: when, and how long the first token takes."""
    if not ranks:
        return {}
    up_s = await group.wait_up(ranks, 60)
    first = {rank: await first_token_s(partial(_ask, group, rank), MODEL) for rank in ranks}
    return {"joiners_healthy_after_s": round(up_s, 3), "joiner_first_token_s": first}


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    """All of it. The group is ended in any case."""
    if arguments.leavers == IMAGED:
        from vllm_elastic_images import imaging  # needs root and CRIU

        with imaging(folder) as arguments.imaging:
            await _run(arguments, folder, arguments.imaging.namespace)
    else:
        await _run(arguments, folder, None)


async def _run(arguments: argparse.Namespace, folder: Path, namespace: Any) -> None:
    try:
        group, measured = await start(arguments, folder, namespace)
        for width in arguments.widths[1:]:
            if arguments.leavers == IMAGED and width > group.width:
                for rank in range(group.width, width):
                    measured.add("image", **arguments.imaging.image_of(group, rank))
            if not await scale(group, measured, width, arguments):
                break
        if arguments.engine == OURS:
            await facts(group, measured)
    finally:
        if (folder / "group.json").exists():
            group = Group.load(folder)
            group.end(sorted(group.pids))


def report(root: Path) -> None:
    """One result of both engines' steps. Raises SystemExit if there are none."""
    steps = {e: Measured(root / e).steps for e in (UPSTREAM, OURS) if (root / e).is_dir()}
    if not any(steps.values()):
        raise SystemExit(f"nothing was measured in {root}")
    metrics = {
        (f"upstream_{name}" if engine == UPSTREAM else name): value
        for engine, of_engine in steps.items()
        for name, value in metrics_of(of_engine).items()
    }
    print(json.dumps(metrics, indent=1))
    print(write_result("vllm_elastic", metrics, steps))


def metrics_of(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The worst of each kind: an operation that failed counts too."""
    metrics: dict[str, float] = {}

    def worst(name: str, value: float) -> None:
        metrics[name] = max(value, metrics.get(name, 0.0))

    for step in steps:
        if step["step"] == "start":
            worst("cold_start_s", step["cold_start_s"])
        elif step["step"] == "scale":
            way = "up" if step["to"] > step["from"] else "down"
            worst(f"{way}_failed", float(not step["ok"]))
            worst(f"{way}{_joined_by(step)}_s", step["total_s"])
            worst(f"gap_{way}_s", step["seen"]["longest_gap_s"])
            for name, counted in (("requests", "requests"), ("requests_failed", "failed")):
                metrics[name] = metrics.get(name, 0) + step["seen"][counted]
        elif step["step"] == "score":
            errors = [e for e in step["max_abs_err_by_rank"].values() if e is not None]
            worst("logprob_max_abs_err", max(errors, default=0.0))
            worst("ranks_without_score", float(len(step["max_abs_err_by_rank"]) - len(errors)))
    return metrics


def _joined_by(step: dict[str, Any]) -> str:
    """How those who joined came: from nothing, or back."""
    joiners = step.get("joiners") or []
    if not joiners:
        return ""
    if any(joiner.get("cold") for joiner in joiners):
        return "_cold"
    if any("image_id" in joiner["restore"] for joiner in joiners):
        return "_image"
    return "_parked" if any(joiner["restore"] for joiner in joiners) else "_kept"


def _widths(text: str) -> list[int]:
    widths = [int(word) for word in text.split(",")]
    if widths[0] < 2 or min(widths) < 1:
        raise argparse.ArgumentTypeError(
            "vLLM 0.33 starts no external-load-balancer group below 2 ranks"
        )
    return widths


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All that is not named here goes to vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("run", "start", "scale", "score", "stop", "report"))
    parser.add_argument("--run-id", required=True, help="joins commands and engines")
    parser.add_argument("--engine", choices=(UPSTREAM, OURS), default=UPSTREAM)
    parser.add_argument("--widths", type=_widths, default=[2, 4, 2], help="scale: the first one")
    parser.add_argument("--max-ranks", type=int, default=0, help="default: the largest width")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--clients", type=int, default=4, help="at each rank that stays")
    parser.add_argument("--tokens", type=int, default=256, help="of one request")
    parser.add_argument(
        "--leavers",
        choices=(ENDED, KEPT, PARKED, IMAGED),
        default=ENDED,
        help="ours: those who leave",
    )
    parser.add_argument(
        "--setting", action="append", default=[], help="ours: NAME=VALUE in its environment"
    )
    parser.add_argument("--serve-s", type=float, default=4.0, help="under load at each width")
    parser.add_argument("--scale-timeout-s", type=float, default=300.0)
    parser.add_argument("--start-timeout-s", type=float, default=330)
    parser.add_argument("--port", type=int, default=8130)
    parser.add_argument("--rpc-port", type=int, default=13345)
    parser.add_argument("--work", type=Path, default=Path(".demo/vllm_elastic"))
    arguments, flags = parser.parse_known_args()
    arguments.flags = flags
    if arguments.engine == UPSTREAM and (min(arguments.widths) < 2 or arguments.leavers != ENDED):
        parser.error("upstream has no group below 2 ranks, and its leavers end")
    return arguments


def main() -> None:
    arguments = _arguments()
    root = arguments.work / arguments.run_id
    folder = root / arguments.engine
    if arguments.command == "report":
        report(root)
    elif arguments.command in ("run", "start"):
        asyncio.run((run if arguments.command == "run" else start)(arguments, folder))
    else:
        _go_on(arguments, Group.load(folder), Measured(folder))


def _go_on(arguments: argparse.Namespace, group: Group, measured: Measured) -> None:
    if arguments.command == "stop":
        group.end(sorted(group.pids))
    elif arguments.command == "score":
        asyncio.run(score(group, measured, f"at {group.width}"))
    elif not asyncio.run(scale(group, measured, arguments.widths[0], arguments)):
        raise SystemExit("the group did not scale: see measured.json")


if __name__ == "__main__":
    main()
