"""One engine's group while it is measured: what it is, what was measured, and the steps that every
measurement is made of. Each step is in its file as soon as it ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_elastic_clients import Clients
from vllm_elastic_meter import seen
from vllm_elastic_ranks import MODEL, Group, alive, write_shape
from vllm_elastic_resize import Limits, resize
from vllm_elastic_scores import compared, first_token_s, logprobs, scored, worst_difference
from vllm_elastic_tiers import TIERS, Ended

_SCORED = {"prompts": 4, "tokens": 8}
_ASK_S = 60.0


class Measured:
    """Everything of one engine's run so far, in its file at all times."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "measured.json"
        self.steps: list[dict[str, Any]] = []
        if self._path.exists():
            self.steps = json.loads(self._path.read_text())

    def add(self, step: str, **values: Any) -> None:
        self.steps.append({"step": step, **values})
        self._path.write_text(json.dumps(self.steps, indent=1, default=str) + "\n")
        print(json.dumps(self.steps[-1], default=str), flush=True)

    def last(self, step: str) -> dict[str, Any]:
        return next((s for s in reversed(self.steps) if s["step"] == step), {})

    def all(self, step: str) -> list[dict[str, Any]]:
        return [s for s in self.steps if s["step"] == step]


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients of one run ask for."""

    clients: int
    """At each rank that stays."""
    tokens: int
    """Of one request."""
    serve_s: float
    """Under load at each width."""
    settle_s: float
    """Under load before an operation, for a first look at the gaps; and after it."""


@dataclass
class Session:
    """A group, what becomes of its leavers, and what was measured of it."""

    group: Group
    tier: Ended
    measured: Measured
    limits: Limits
    load: Load

    @classmethod
    def of(cls, group: Group, limits: Limits, load: Load, imaging: Any = None) -> Session:
        tier = TIERS[group.setup.leavers](group, imaging)
        return cls(group, tier, Measured(group.folder), limits, load)

    def clients(self, ranks: Sequence[int] = ()) -> Clients:
        """That stream at `ranks` until they are stopped."""
        clients = Clients(self.group.url, MODEL, tokens=self.load.tokens)
        clients.start(ranks, self.load.clients)
        return clients

    async def ask(self, rank: int, body: Any) -> tuple[int, Any]:
        return await self.group.post(rank, "/v1/completions", body, _ASK_S)

    async def resize(self, width: int, **how: Any) -> dict[str, Any]:
        """See vllm_elastic_resize; leavers are not seen off."""
        return await resize(self.group, self.tier, width, self.limits, **how)

    async def prepare(self, width: int) -> None:
        """Before an operation, and no part of it: what those need who will join."""
        for rank in range(self.group.width, width):
            if done := await self.tier.prepare(rank):
                self.measured.add("image", **done)

    async def see_off(self, leavers: Sequence[int]) -> None:
        if leavers:
            for step, values in (await self.tier.see_off(leavers)).items():
                self.measured.add(step, ranks=values)

    async def score(self, when: str) -> None:
        """Log-probabilities of what every rank says, against the first ones that were measured."""
        first = self.measured.last("first score").get("logprobs")
        worst: dict[int, float | None] = {}
        for rank in range(self.group.width):
            found = await logprobs(partial(self.ask, rank), MODEL, **_SCORED)
            if first is None and found:
                first = found
                self.measured.add("first score", logprobs=found)
            worst[rank] = worst_difference(first, found)
        self.measured.add("score", when=when, max_abs_err_by_rank=worst)

    async def score_prompts(self, when: str, number: int) -> None:
        """A fixed set of prompts, by all ranks in turn, against the first time that they were."""
        path = self.group.folder / "prompts.json"
        found = await scored(self.ask, range(self.group.width), MODEL, number)
        if not path.exists():
            path.write_text(json.dumps(found) + "\n")
        first = json.loads(path.read_text())
        self.measured.add(
            "prompts", when=when, width=self.group.width, number=number, **compared(first, found)
        )

    async def scale(self, width: int) -> bool:
        """Scale under load; False if a rank refused. Streams of ranks that leave are moved first,
        as a router's migration does it."""
        before = self.group.width
        stay, leavers = range(min(before, width)), range(width, before)
        await self.prepare(width)
        clients = self.clients(range(before))
        await asyncio.sleep(self.load.settle_s)
        began_s = time.monotonic()
        clients.move(leavers, stay)
        found = await self.resize(width)
        total_s = found["total_s"]
        if found["ok"]:
            found |= await self._joined(range(before, width))
        await asyncio.sleep(self.load.settle_s)
        await clients.stop()
        window = seen(clients.streams, began_s, began_s + total_s + 1.0)
        quiet = seen(clients.streams, began_s - self.load.settle_s, began_s)
        self.measured.add("scale", **found, seen=asdict(window), before=asdict(quiet))
        if found["ok"]:
            await self.score(f"after {before} -> {width}")
            await self.serve()
            await self.see_off(leavers)
        return bool(found["ok"])

    async def serve(self) -> None:
        """All ranks under load for a while: experts are rebalanced meanwhile."""
        began_s = time.monotonic()
        clients = self.clients(range(self.group.width))
        await asyncio.sleep(self.load.serve_s)
        ended_s = time.monotonic()
        await clients.stop()
        found = asdict(seen(clients.streams, began_s, ended_s))
        self.measured.add("serve", width=self.group.width, seen=found)
        await self.score(f"after serving at {self.group.width}")

    async def _joined(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Ranks that have joined answer from now on: when, and how long the first token takes."""
        if not ranks:
            return {}
        up_s = await self.group.wait_up(ranks, _ASK_S)
        first = {rank: await first_token_s(partial(self.ask, rank), MODEL) for rank in ranks}
        return {"joiners_healthy_after_s": round(up_s, 3), "joiner_first_token_s": first}

    async def facts(self) -> None:
        """What our workers say of their hooks and graphs, while nothing is asked of them."""
        ranks = range(self.group.width)
        for method in ("elastic_facts", "elastic_rebind_check"):
            call = {"method": method, "timeout": 60}
            said = {r: (await self.group.post(r, "/collective_rpc", call, 90))[1] for r in ranks}
            self.measured.add(method, ranks=said)


async def boot(session: Session, timeout_s: float) -> None:
    """Its group is up, cold, with the ranks that it is to have first; else nobody of it is left."""
    group, width = session.group, session.group.width
    write_shape(group.folder / "model", group.setup.layers)
    try:
        for rank in range(width):
            group.start(rank, width, joins=False)
        up_s = await group.wait_up(range(width), timeout_s)
    except BaseException:
        group.end(sorted(group.pids))
        raise
    session.measured.add(
        "start", width=width, cold_start_s=round(up_s, 1), setup=asdict(group.setup)
    )


def lives(folder: Path) -> bool:
    """Whether a command before this one left a group that serves."""
    if not (folder / "group.json").exists():
        return False
    group = Group.load(folder)
    return bool(group.pids) and all(
        rank in group.pids and alive(group.pids[rank]) for rank in range(group.width)
    )


def end(folder: Path) -> None:
    """Nobody of the group is left, if there is one."""
    if (folder / "group.json").exists():
        group = Group.load(folder)
        group.end(sorted(group.pids))
