"""Child processes of `serve`: started in order, watched, restarted, stopped in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_elastic.config_sources import VARIABLE_PREFIX
from dynamo_elastic.errors import ElasticError

log = logging.getLogger(__name__)

# In the child: be told to end if `serve` itself is killed, so that nothing is left behind.
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM", "--")
_RESTART_DELAY_S = (0.1, 1.0, 3.0, 5.0)
_HEALTHY_AFTER_S = 3.0
"""A process that lived so long may be restarted as if it had never ended."""
_LOG_TAIL_LINES = 5

Ready = Callable[[], Awaitable[None]]


class ProcessFailed(ElasticError):
    """A process did not come up, or ended and may not be restarted; carries its log's tail."""

    def __init__(self, name: str, why: str, log_path: Path) -> None:
        super().__init__(f"{name} {why}: {log_tail(log_path)} (log: {log_path})")
        self.name = name


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One child process. `critical`: its end is the end of the deployment; others start again,
    unless they end with exit code 0, as told."""

    name: str
    argv: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    critical: bool = False
    always: bool = False
    """Started again after exit code 0, too: Dynamo's own end so when they lose their lease."""
    stop_timeout_s: float = 10.0
    secrets: Callable[[], Mapping[str, str]] = dict
    """More of its environment, read at each start and shown nowhere."""


@dataclass(slots=True)
class _Child:
    spec: ProcessSpec
    process: asyncio.subprocess.Process
    watcher: asyncio.Task[None] | None = None
    restarts: int = 0


class Supervisor:
    """Owns child processes: restarts the ones that end, says when that is no use."""

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Gets why the deployment can't go on: a critical process ended, or one keeps ending."""

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children by name."""
        return {name: child.process.pid for name, child in self._children.items()}

    async def start(self, spec: ProcessSpec, ready: Ready | None, *, timeout_s: float) -> None:
        """Start a process and wait until `ready` returns. Raises ProcessFailed if the process ends
        or `timeout_s` passes first; stop() it then, too."""
        child = _Child(spec, await _spawn(spec))
        self._children[spec.name] = child
        if ready is not None:
            await self._wait_ready(child, ready, timeout_s)
        child.watcher = asyncio.create_task(self._watch(child))

    async def _wait_ready(self, child: _Child, ready: Ready, timeout_s: float) -> None:
        ended = asyncio.create_task(child.process.wait())
        up = asyncio.ensure_future(ready())
        try:
            done, _ = await asyncio.wait(
                {ended, up}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if up in done:
                up.result()
                return
            why = (
                f"exited with {child.process.returncode}"
                if ended in done
                else f"was not ready within {timeout_s:g} s"
            )
            raise ProcessFailed(child.spec.name, why, child.spec.log_path)
        finally:
            for task in (ended, up):
                task.cancel()

    async def stop(self, name: str) -> None:
        """Stop one process (SIGTERM, then SIGKILL after its time) and forget it."""
        child = self._children.pop(name, None)
        if child is not None:
            await _stop(child)

    def report(self, task: asyncio.Task[None]) -> None:
        """A task of the deployment has ended: unless it was cancelled, that is a failure."""
        if not task.cancelled() and not self.failed.done():
            why = task.exception() or ElasticError("a task of the deployment ended")
            self.failed.set_result(why)

    async def restart(self, name: str) -> None:
        """Stop a process and start it anew; does not wait until it is ready."""
        spec = self._children[name].spec
        await self.stop(name)
        await self.start(spec, None, timeout_s=spec.stop_timeout_s)

    async def _watch(self, child: _Child) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            returncode = await child.process.wait()
            spec = child.spec
            if loop.time() - began_s > _HEALTHY_AFTER_S:
                child.restarts = 0
            told = returncode == 0 and not (spec.critical or spec.always)
            if told or self._children.get(spec.name) is not child:
                return
            if spec.critical or child.restarts >= len(_RESTART_DELAY_S):
                failure = ProcessFailed(spec.name, f"exited with {returncode}", spec.log_path)
                if not self.failed.done():
                    self.failed.set_result(failure)
                return
            delay_s = _RESTART_DELAY_S[child.restarts]
            child.restarts += 1
            log.warning("%s exited with %s; restarting in %g s", spec.name, returncode, delay_s)
            await asyncio.sleep(delay_s)
            child.process = await _spawn(spec)


async def _spawn(spec: ProcessSpec) -> asyncio.subprocess.Process:
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_path.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            *_DIE_WITH_PARENT,
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**inherited_environment(), **spec.environment, **spec.secrets()},
            start_new_session=True,
        )


def inherited_environment() -> dict[str, str]:
    """Ours, but for our settings: children get those that are in force in a file."""
    return {k: v for k, v in os.environ.items() if not k.startswith(VARIABLE_PREFIX)}


async def _stop(child: _Child) -> None:
    if child.watcher is not None:
        child.watcher.cancel()
    process = child.process
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), child.spec.stop_timeout_s)
        except TimeoutError:
            log.warning("%s ignored SIGTERM; killing it", child.spec.name)
            process.kill()
            await process.wait()


def log_tail(path: Path) -> str:
    """The last lines of a log, on one line."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    return " | ".join(lines[-_LOG_TAIL_LINES:]) or "empty log"
