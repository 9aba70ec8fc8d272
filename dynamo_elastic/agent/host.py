"""What this host offers to engines: a pid namespace that outlives the agent, or plain processes."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.agent.records import write_whole
from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.base import ATTACH_FILE
from dynamo_elastic.errors import EngineError
from dynamo_elastic.snapshot.base import PIDS_PER_SLOT, Namespace, first_pid
from dynamo_elastic.snapshot.namespace import (
    HostNamespace,
    PidNamespace,
    create_namespace,
    namespace_of,
)
from dynamo_elastic.snapshot.process import (
    ProcessRef,
    alive,
    kill_and_wait,
    kill_session,
    session_of,
)

LOCK_FILE = "agent.lock"
NAMESPACE_FILE = "namespace.json"
_END_TIMEOUT_S = 10.0
_PROCESS = TypeAdapter(ProcessRef)
NO_NAMESPACE = "not root: engines run as plain processes, and snapshots are off"


@dataclass(frozen=True, slots=True)
class Host:
    """`skipped` names what this host can't do and why. `cursor` is the first pid that engines
    started cold, and all threads made later, may get."""

    namespace: Namespace
    skipped: tuple[str, ...]
    cursor: int

    def guard_pids(self) -> None:
        """Keep the pid ranges of images free of new processes and threads: call it again and
        again, see PidNamespace.guard_pids()."""
        if isinstance(self.namespace, PidNamespace):
            self.namespace.guard_pids(self.cursor)

    def holds(self, process: ProcessRef) -> bool:
        """True if it runs where our engines do."""
        theirs = namespace_of(process)
        return theirs is None or theirs == self.namespace

    def end_elsewhere(self, process: ProcessRef) -> None:
        """End a process that is not where our engines are, with the namespace around it, which
        nobody knows any more."""
        theirs = namespace_of(process)
        if theirs is not None and theirs != self.namespace:
            theirs.end(timeout_s=_END_TIMEOUT_S)
        kill_session(process, timeout_s=_END_TIMEOUT_S)

    def end_strays(self, keep: frozenset[ProcessRef]) -> None:
        """Kill what runs in the namespace and belongs to none of `keep`: starts, or restores still
        under way, that a dead agent left."""
        if not isinstance(self.namespace, PidNamespace):
            return
        sessions = {process.pid for process in keep}
        # Again until there are none: one that is killed may just have started another.
        while strays := [
            process
            for process in self.namespace.processes()
            if session_of(process.pid) not in sessions
        ]:
            for process in strays:
                kill_and_wait(process, timeout_s=_END_TIMEOUT_S)


def lock_state(config: DeploymentConfig) -> IO[str]:
    """Hold the deployment's state directory, which is made, until the file is closed. Raises
    EngineError if another agent holds it."""
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = (config.state_dir / LOCK_FILE).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise EngineError(f"another agent serves {config.state_dir}: stop it first") from None
    return lock


def open_host(config: DeploymentConfig) -> Host:
    """The deployment's namespace: the one its last agent left, if that lives, else a new one."""
    cursor = first_pid(config.scale.max_ranks) + PIDS_PER_SLOT
    if os.geteuid() != 0:
        return Host(HostNamespace(), (NO_NAMESPACE,), cursor)
    path = config.state_dir / NAMESPACE_FILE
    namespace = _adopt(path)
    if namespace is None:
        namespace = create_namespace()
        write_whole(path, _PROCESS.dump_json(namespace.init))
    host = Host(namespace, (), cursor)
    host.guard_pids()
    return host


def close_host(config: DeploymentConfig, host: Host) -> None:
    """End the namespace and all in it. Idempotent."""
    host.namespace.end(timeout_s=_END_TIMEOUT_S)
    (config.state_dir / NAMESPACE_FILE).unlink(missing_ok=True)
    for slot in range(config.scale.max_ranks):
        (config.control_dir(slot) / ATTACH_FILE).unlink(missing_ok=True)


def _adopt(path: Path) -> PidNamespace | None:
    try:
        init = _PROCESS.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return PidNamespace(init) if alive(init) else None
