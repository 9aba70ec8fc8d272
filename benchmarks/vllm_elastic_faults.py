"""Faults in the middle of a scale operation, under load: how long those who stay are silent,
whether a token that they served is wrong, and whether the next operation succeeds."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from itertools import takewhile
from typing import Any

from vllm_elastic_clients import Clients
from vllm_elastic_meter import Stream, seen, silent_s
from vllm_elastic_ranks import MODEL, OURS
from vllm_elastic_resize import Stage
from vllm_elastic_scores import wrong_tokens
from vllm_elastic_session import Session

_JUDGED = 48
"""Streams whose tokens are compared: the last ones that were there when it happened, or after."""
_JUDGING_S = 60.0
_LOOK_S = 0.05


class Fault(StrEnum):
    """What is done, to whom, and when."""

    RESTORED = "joiner-killed-restored"
    STREAM = "joiner-killed-in-stream"
    READY = "joiner-killed-ready"
    COMMIT = "joiner-killed-at-commit"
    SERVING = "joiner-killed-serving"
    STOPPED = "joiner-stopped-in-stream"
    STOPPED_READY = "joiner-stopped-ready"
    COLD = "joiner-killed-in-cold-start"
    RETAINED = "retained-killed"


class When(StrEnum):
    """How long after a joiner's stage something is done to it."""

    AT_ONCE = "at once"
    IN_STREAM = "in the middle of its weights, as the last attach had it, or --fault-after-s"
    LATER = "after --fault-after-s"


@dataclass(frozen=True, slots=True)
class Act:
    """A signal, to the joiner or to the last of those who stay."""

    stage: Stage
    when: When = When.AT_ONCE
    signal: int = signal.SIGKILL
    retained: bool = False


ACTS: Mapping[Fault, Act] = {
    Fault.RESTORED: Act(Stage.RESTORED),
    Fault.STREAM: Act(Stage.RESTORED, When.IN_STREAM),
    Fault.READY: Act(Stage.READY),
    Fault.COMMIT: Act(Stage.COMMITTING),
    Fault.SERVING: Act(Stage.COMMITTING, When.LATER),
    Fault.STOPPED: Act(Stage.RESTORED, When.IN_STREAM, signal.SIGSTOP),
    Fault.STOPPED_READY: Act(Stage.READY, signal=signal.SIGSTOP),
    Fault.COLD: Act(Stage.RESTORED, When.LATER),
    Fault.RETAINED: Act(Stage.RESTORED, When.LATER, retained=True),
}


class Saboteur:
    """Does one fault in one operation, and knows when it did."""

    def __init__(self, session: Session, act: Act, victim: int, given_s: float) -> None:
        self._group, self._act, self.victim = session.group, act, victim
        self._joiner = session.group.width
        self._after_s = {
            When.AT_ONCE: 0.0,
            When.IN_STREAM: stream_after_s(session.measured.steps, given_s),
            When.LATER: given_s,
        }[act.when]
        self._task: asyncio.Task[None] | None = None
        self.acted_s: float | None = None

    async def watch(self, stage: Stage, rank: int) -> None:
        """The watcher of the operation. What is due at once is done before the joiner goes on."""
        if stage is self._act.stage and rank == self._joiner and self._task is None:
            self._task = asyncio.create_task(self._do())
            if not self._after_s:
                await self._task

    async def _do(self) -> None:
        await asyncio.sleep(self._after_s)
        self._group.send(self.victim, self._act.signal)
        self.acted_s = time.monotonic()

    async def done(self) -> None:
        """It did what it has to, if it got the chance."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def stream_after_s(steps: Sequence[Mapping[str, Any]], given_s: float) -> float:
    """From a restored joiner to the middle of its weights, as the last one had it; or `given_s`.

    >>> joiner = {"attach": {"handshake": 0.25, "worker": 1.0, "weights": 2.0, "worker: memory": 9}}
    >>> stream_after_s([{"joiners": [joiner]}], 7.0)
    2.25
    """
    for step in reversed(steps):
        for joiner in step.get("joiners") or ():
            parts = joiner.get("attach") or {}
            if "weights" in parts:
                before = takewhile(lambda part: part[0] != "weights", parts.items())
                return float(sum(s for _, s in before) + parts["weights"] / 2)
    return given_s


async def inject(
    session: Session, fault: Fault, width: int, watch_s: float, given_s: float, *, lower: bool
) -> bool:
    """One fault while the group grows to `width`, watched until `watch_s` after it, and what comes
    next: it grows again or, if `lower`, it gets smaller and grows back, which needs no cold joiner.
    False if that did not succeed: the group is of no more use."""
    act, before = ACTS[fault], session.group.width
    left = before - 1 if act.retained else before
    victim = left if act.retained else before
    await session.prepare(width)
    saboteur = Saboteur(session, act, victim, given_s)
    clients = session.clients(range(left))
    await asyncio.sleep(session.load.settle_s)
    began_s = time.monotonic()
    operations = await _watched(session, saboteur, width, left, watch_s)
    ended_s = time.monotonic()
    await session.tier.end(range(left, width) if act.retained else [victim])
    back = (left - 1, left) if lower and left > 1 else (width,)
    targets = (left, *back)
    following = await _next(session, clients, targets, range(left, width))
    after_s = time.monotonic()
    await clients.stop()
    hurt_s = saboteur.acted_s or began_s
    affected = [s for s in clients.streams if s.began_s < ended_s and _last_s(s) >= hurt_s]
    ok = bool(following) and all(each["ok"] for each in following)
    session.measured.add(
        "fault", fault=fault, width=before, to=width, acted=saboteur.acted_s is not None,
        acted_after_s=round(hurt_s - began_s, 3), operations=operations,
        silent_s=_silent_s(clients, range(left), began_s, ended_s),
        seen=asdict(seen(clients.streams, began_s, ended_s)), next=following, next_ok=ok,
        next_silent_s=_silent_s(clients, range(min(targets)), ended_s, after_s),
        tokens=await _judged(session, affected[-_JUDGED:]),
    )  # fmt: skip
    return ok


async def _watched(
    session: Session, saboteur: Saboteur, width: int, left: int, watch_s: float
) -> list[dict[str, Any]]:
    """The operations until so long after the fault: that which it hits and, if a rank that is in
    force was hit, that of whoever watches the ranks, which goes on with those who are left."""
    began_s = time.monotonic()

    async def operations() -> None:
        found.append(await session.resize(width, watcher=saboteur.watch))
        await saboteur.done()
        if session.group.width > left:
            found.append(await session.resize(left, without={saboteur.victim}))

    found: list[dict[str, Any]] = []
    task = asyncio.create_task(operations())
    # Whoever watches the ranks of ours gives a joiner up; upstream can't be told.
    patience_s = session.limits.joiner_s if session.group.setup.engine == OURS else 0.0
    try:
        while True:
            hurt_s = saboteur.acted_s or began_s + (0.0 if task.done() else session.limits.scale_s)
            if time.monotonic() > hurt_s + watch_s + (0.0 if task.done() else patience_s):
                break
            await asyncio.sleep(_LOOK_S)
        if task.done():
            task.result()
        else:
            unanswered_s = round(time.monotonic() - began_s, 1)
            found.append({"ok": False, "unanswered_after_s": unanswered_s})
        return found
    finally:
        task.cancel()
        await saboteur.close()


async def _next(
    session: Session, clients: Clients, targets: Sequence[int], joiners: Sequence[int]
) -> list[dict[str, Any]]:
    """What follows, until an operation fails: then nobody of `joiners` is left. Clients of ranks
    that leave go on at the others."""
    found = []
    for target in targets:
        before = session.group.width
        if target == before:
            continue
        clients.move(range(target, before), range(min(target, before)))
        found.append(await session.resize(target))
        if not found[-1]["ok"]:
            await session.tier.end(joiners)
            break
        if lives := [rank for rank in range(target, before) if rank in session.group.pids]:
            await session.see_off(lives)
    return found


async def _judged(session: Session, streams: Sequence[Stream]) -> dict[str, Any]:
    judging = wrong_tokens(partial(session.ask, 0), MODEL, streams)
    try:
        return await asyncio.wait_for(judging, _JUDGING_S)
    except TimeoutError:
        return {"judged": 0, "streams_not_judged": len(streams)}


def _silent_s(clients: Clients, ranks: Sequence[int], since_s: float, until_s: float) -> float:
    return round(max(silent_s(clients.streams, r, since_s, until_s) for r in ranks), 3)


def _last_s(stream: Stream) -> float:
    return stream.tokens_s[-1] if stream.tokens_s else 0.0


def faults_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By fault, the worst that was seen; and of all of them together."""
    found: dict[str, float] = {}

    def worst(name: str, value: float) -> None:
        found[name] = max(value, found.get(name, 0.0))

    for step in steps:
        if step["step"] != "fault" or not step["acted"]:
            continue
        name = f"fault_{step['fault'].replace('-', '_')}"
        worst(f"{name}_silent_s", step["silent_s"])
        worst(f"{name}_next_failed", float(not step["next_ok"]))
        worst(f"{name}_requests_failed", step["seen"]["failed"])
        found["faults"] = found.get("faults", 0) + 1
        found["faults_next_failed"] = found.get("faults_next_failed", 0) + (not step["next_ok"])
        if step["tokens"]["judged"]:
            wrong = step["tokens"]["wrong"]
            worst(f"{name}_wrong_tokens", wrong)
            found["faults_wrong_tokens"] = found.get("faults_wrong_tokens", 0) + wrong
    return found
