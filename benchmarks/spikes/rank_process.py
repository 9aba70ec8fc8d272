"""A rank is a process driven through files: no socket ties it to its driver in a snapshot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common import SpikeError, wait_until

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
_spawned: list[Rank] = []


class _Outcome:
    """Turns what an operation raises into an answer: the rank must survive it."""

    def __init__(self) -> None:
        self.failure: dict[str, str] | None = None

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failure = {
            "error": f"{type(error).__name__}: {error}"[:600],
            "trace": traceback.format_exc()[-1200:],
        }
        return True


def serve(target: object, folder: Path) -> None:
    """Answer `cmdN` files with `resN` files until the process is killed."""
    (folder / "ready.tmp").write_text(str(os.getpid()))
    (folder / "ready.tmp").rename(folder / "ready")
    index = 0
    while True:
        command = folder / f"cmd{index}"
        if not command.exists():
            time.sleep(0.001)
            continue
        request = json.loads(command.read_text())
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        with _Outcome() as outcome:
            answer["value"] = getattr(target, request["op"])(**request["args"])
        answer["s"] = time.perf_counter() - begin
        answer.update(outcome.failure or {})
        draft = folder / f"res{index}.tmp"
        draft.write_text(json.dumps(answer, default=str))
        draft.rename(folder / f"res{index}")
        index += 1


class Rank:
    """Driver's side of one rank."""

    def __init__(
        self,
        script: str,
        tag: str,
        gpu: int,
        *,
        first_pid: int | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.tag = tag
        self.gpu = gpu
        self.folder = Path(tempfile.mkdtemp(prefix=f"rank-{tag}-"))
        self._next = 0
        self._mark = 0
        if first_pid is not None:
            # A pid range of its own lets several images live in one pid namespace later.
            LAST_PID.write_text(str(first_pid - 1))
        here = Path(__file__).resolve().parent
        environment = dict(
            os.environ, CUDA_VISIBLE_DEVICES=str(gpu), UCX_LOG_LEVEL="error", **(env or {})
        )
        with (self.folder / "log").open("ab") as log:  # append: a grown log must still restore
            self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, str(here / script), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        self.pid = self.process.pid
        _spawned.append(self)

    def log_tail(self, size: int = 1500) -> str:
        """The end of what the rank printed."""
        return (self.folder / "log").read_text(errors="replace")[-size:]

    def wait_ready(self, timeout_s: float = 90) -> Self:
        """Wait until the rank serves commands."""
        ready = self.folder / "ready"
        wait_until(lambda: ready.exists() or not self.alive(), timeout_s, f"{self.tag} start")
        if not ready.exists():
            raise SpikeError(f"{self.tag} died at start: {self.log_tail()}")
        return self

    def alive(self) -> bool:
        """Whether the process runs (a zombie does not)."""
        if self.process is not None:
            return self.process.poll() is None
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        return "State:\tZ" not in status

    def send(self, op: str, /, **args: Any) -> int:
        """Post a command without waiting."""
        index, self._next = self._next, self._next + 1
        draft = self.folder / "cmd.tmp"
        draft.write_text(json.dumps({"op": op, "args": args}))
        draft.rename(self.folder / f"cmd{index}")
        return index

    def receive(self, index: int, timeout_s: float = 60) -> dict[str, Any]:
        """The whole answer: value, seconds, and the error if there was one."""
        path = self.folder / f"res{index}"
        try:
            wait_until(
                lambda: path.exists() or not self.alive(), timeout_s, f"{self.tag} command {index}"
            )
        except SpikeError as error:
            raise SpikeError(f"{error}; log: {self.log_tail()}") from None
        if not path.exists():
            raise SpikeError(f"{self.tag} died in command {index}: {self.log_tail()}")
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer

    def ask(self, op: str, /, *, timeout_s: float = 60, **args: Any) -> dict[str, Any]:
        """Send and receive."""
        return self.receive(self.send(op, **args), timeout_s)

    def call(self, op: str, /, *, timeout_s: float = 60, **args: Any) -> Any:
        """Send, receive, and raise SpikeError if the operation failed."""
        return value_of(self, op, self.ask(op, timeout_s=timeout_s, **args))

    def mark(self) -> None:
        """Remember where the mailbox stands; an image taken now resumes here."""
        self._mark = self._next

    def rewind(self) -> None:
        """Before a restore: the mailbox as the image saw it; the process is no child of ours."""
        self.process = None
        self._next = self._mark
        for path in self.folder.glob("*"):
            number = path.name[3:]
            if path.name[:3] in ("cmd", "res") and number.isdigit() and int(number) >= self._mark:
                path.unlink()

    def _is_mine(self) -> bool:
        """Whether `pid` still is this rank: a number may have been given to another process."""
        try:
            return str(self.folder).encode() in Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return False

    def kill(self, timeout_s: float = 15) -> None:
        """End this process only, and wait until its pid is free."""
        if not self._is_mine():
            return
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(timeout_s)
        gone = Path(f"/proc/{self.pid}")  # a zombie holds the pid that a restore needs
        wait_until(lambda: not gone.exists(), timeout_s, f"{self.tag} exit")


def value_of(rank: Rank, op: str, answer: dict[str, Any]) -> Any:
    """The value of an answer, or SpikeError with the remote trace."""
    if "error" in answer:
        raise SpikeError(f"{rank.tag}.{op}: {answer['error']}\n{answer.get('trace', '')[-700:]}")
    return answer["value"]


def call_all(ranks: Sequence[Rank], op: str, *, timeout_s: float = 60, **args: Any) -> list[Any]:
    """The same operation on several ranks at once."""
    posted = [(rank, rank.send(op, **args)) for rank in ranks]
    return [value_of(rank, op, rank.receive(index, timeout_s)) for rank, index in posted]


def kill_all() -> None:
    """End every rank this spike started."""
    for rank in _spawned:
        try:
            rank.kill()
        except (SpikeError, subprocess.TimeoutExpired) as error:
            print(f"could not end {rank.tag} (pid {rank.pid}): {error}", flush=True)
