"""Ranks of an expert-parallel group, seen from outside: threads on fakes, or processes on GPUs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dynamo_elastic.comm.expert_rules import IPC_CACHE_VARIABLE
from dynamo_elastic.testing.expert_buffer import FakeExpertWorld
from dynamo_elastic.testing.expert_buffer_rank import ExpertRank, answer
from dynamo_elastic.types import Rank

CALL_TIMEOUT_S = 60.0


T = TypeVar("T", bound="RankHandle")


class RankFailed(Exception):
    """An operation of a rank raised; `kind` is the name of the error's type."""

    def __init__(self, rank: int, op: str, kind: str, message: str, trace: str = "") -> None:
        super().__init__(f"{op} of rank {rank}: {kind}: {message}\n{trace}")
        self.kind = kind
        self.message = message


class RankHandle(Protocol):
    """A rank that runs somewhere. One operation at a time."""

    number: int

    def post(self, op: str, /, **args: Any) -> Callable[[], Any]:
        """Start an operation; what is returned waits for its result. Raises RankFailed."""
        ...

    def call(self, op: str, /, **args: Any) -> Any: ...
    def close(self) -> None: ...


class RankThread:
    """A rank on a fake, in a thread of this process."""

    def __init__(self, number: int, world: FakeExpertWorld) -> None:
        self.number = number
        self._world = world
        self.rank = ExpertRank(world.make, "cpu")
        self._pool = ThreadPoolExecutor(1)

    def post(self, op: str, /, **args: Any) -> Callable[[], Any]:
        # Through JSON, as to a process: what passes here passes there.
        request = json.loads(json.dumps({"op": op, "args": args}))
        future = self._pool.submit(answer, self.rank, request)
        return lambda: value_of(self.number, op, future.result(CALL_TIMEOUT_S))

    def call(self, op: str, /, **args: Any) -> Any:
        return self.post(op, **args)()

    def close(self) -> None:
        """As a process that is killed."""
        self._pool.shutdown(cancel_futures=True)
        self._world.kill(Rank(self.number))


class RankProcess:
    """A rank on a GPU, in a process of its own: `program`, with the descriptor of a socket to serve
    and `arguments` behind it. Its output goes to `log`."""

    def __init__(
        self,
        number: int,
        gpu: int,
        *,
        program: Sequence[str] = ("-m", "dynamo_elastic.testing.expert_buffer_rank"),
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.number = number
        self.gpu = gpu
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": str(gpu),
            IPC_CACHE_VARIABLE: "n",
            **(env or {}),
        }
        prefix = f"rank{number}-"
        with theirs, tempfile.NamedTemporaryFile(prefix=prefix, suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                [sys.executable, *program, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        ours.settimeout(CALL_TIMEOUT_S)
        self._socket = ours
        self._lines = ours.makefile("rw")

    def post(self, op: str, /, **args: Any) -> Callable[[], Any]:
        try:
            self._lines.write(json.dumps({"op": op, "args": args}) + "\n")
            self._lines.flush()
        except OSError as exc:
            raise RankFailed(self.number, op, "Gone", str(exc), self.tail()) from exc
        return lambda: self._receive(op)

    def _receive(self, op: str) -> Any:
        try:
            line = self._lines.readline()
        except OSError as exc:
            raise RankFailed(self.number, op, "Silent", str(exc), self.tail()) from exc
        if not line:
            raise RankFailed(self.number, op, "Gone", "the process ended", self.tail())
        return value_of(self.number, op, json.loads(line))

    def call(self, op: str, /, **args: Any) -> Any:
        return self.post(op, **args)()

    def tail(self, size: int = 1500) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-size:]

    def stop(self) -> None:
        """It does nothing more, and stays."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._lines.close()
        self._socket.close()
        self.log.unlink(missing_ok=True)


def value_of(number: int, op: str, answered: Mapping[str, Any]) -> Any:
    if "kind" in answered:
        raise RankFailed(number, op, answered["kind"], answered["message"], answered["trace"])
    return answered["value"]


def call_all(ranks: Sequence[RankHandle], op: str, /, **args: Any) -> list[Any]:
    """The same operation on all ranks at once; all have ended when this returns or raises."""
    return gather([rank.post(op, **args) for rank in ranks])


def gather(waiting: Sequence[Callable[[], Any]]) -> list[Any]:
    """All results. Raises the first failure, after all have ended."""
    results: list[Any] = []
    failures: list[RankFailed] = []
    for wait in waiting:
        try:
            results.append(wait())
        except RankFailed as exc:
            failures.append(exc)
    if failures:
        raise failures[0]
    return results


def connect(
    newcomers: Sequence[RankHandle], present: Sequence[RankHandle], *, timeout_s: float = 30
) -> list[float]:
    """Connect newcomers to those present and to each other, masked; seconds of each rank."""
    everyone = [*present, *newcomers]
    blobs = {rank.number: rank.call("metadata") for rank in everyone}
    waiting = []
    for rank in everyone:
        others = everyone if rank in newcomers else newcomers
        peers = {str(o.number): blobs[o.number] for o in others if o is not rank}
        waiting.append(rank.post("connect", peers=peers, timeout_s=timeout_s))
    return gather(waiting)


def activate(ranks: Sequence[RankHandle], pairs: Mapping[int, Sequence[int]] | None = None) -> None:
    """Every rank takes in those given for it, or all others."""
    numbers = [rank.number for rank in ranks]
    for rank in ranks:
        others = [n for n in numbers if n != rank.number]
        rank.call("activate", ranks=others if pairs is None else list(pairs[rank.number]))


def part(leavers: Sequence[RankHandle], staying: Sequence[RankHandle]) -> None:
    """Leavers and those that stay unmap each other: first all that stay, then the leavers."""
    for first, second in ((staying, leavers), (leavers, staying)):
        for rank in first:
            others = [o.number for o in second]
            rank.call("deactivate", ranks=others)
    for first, second in ((staying, leavers), (leavers, staying)):
        for rank in first:
            rank.call("disconnect", ranks=[o.number for o in second])


def joint_step(ranks: Sequence[RankHandle], *, layers: int = 1, seed: int = 7) -> dict[str, Any]:
    """One step of all over everybody's experts: worst error, bad tokens, who was masked."""
    world = [rank.number for rank in ranks]
    call_all(ranks, "route", world=world, seed=seed)
    steps = call_all(ranks, "step", layers=layers)
    checks = call_all(ranks, "check", world=world)
    return {
        "error": max(check["error"] for check in checks),
        "bad_tokens": sum(check["bad_tokens"] for check in checks),
        "masked": [step["masked"] for step in steps],
        "step_s": max(step["step_s"] for step in steps),
    }


SMALL = {
    "capacity": 4,
    "experts_per_rank": 2,
    "hidden": 2048,
    "top_k": 2,
    "max_tokens": 8,
    "timeout_ms": 300,
}
"""The shape of a buffer for four ranks."""


def expand_lose_contract(ranks: Sequence[T], *, lose: Callable[[T], object]) -> None:
    """[0, 1] -> [0, 1, 2, 3]; then rank 2 is lost in the middle of serving and 1 leaves: [0, 3].
    Every step's result is that of the ranks that live. Raises RuntimeError where it is not."""
    first, second, third, fourth = ranks
    for rank in ranks:
        rank.call("open", rank=rank.number, **SMALL)
    connect([second], [first])
    activate([first, second])
    _must_be_right([first, second])
    connect([third, fourth], [first, second])
    new = [third.number, fourth.number]
    activate([third, fourth], {2: [0, 1, 3], 3: [0, 1, 2]})
    activate([first, second], {0: new, 1: new})
    _must_be_right(ranks)
    lose(third)
    living = [first, second, fourth]
    call_all(living, "route", world=[r.number for r in ranks])
    masked = [step["masked"] for step in call_all(living, "step")]
    if masked != [[third.number]] * 3:
        raise RuntimeError(f"masked after the loss: {masked}")
    for rank in living:
        rank.call("disconnect", ranks=[third.number])
    _must_be_right(living, masked=third.number)
    part([second], [first, fourth])
    _must_be_right([first, fourth])


def _must_be_right(ranks: Sequence[RankHandle], masked: int | None = None) -> None:
    result = joint_step(ranks)
    known = [] if masked is None else [masked]
    if result["bad_tokens"] or any(set(m) - set(known) for m in result["masked"]):
        raise RuntimeError(f"ranks {[r.number for r in ranks]}: {result}")
