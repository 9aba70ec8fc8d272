"""How each fault is done to a world, and undone. What a fault left behind that the deployment has
to mend by itself (a dead process, a lost lease) is not undone here."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from dynamo_elastic.testing.chaos.occasions import bring_about
from dynamo_elastic.testing.chaos.scenario import AtFailpoint, AtRandom, Fault, Occasion, Scenario
from dynamo_elastic.testing.chaos.world import World, etcd_client

STOP_S = 4.0
PARTITION_S = 5.0
QUORUM_LOST_S = 10.0
SLOW_S = 4.0
FULL_S = 2.0
MEMORY_S = 2.0
JUMP = "+3600"

_COMMIT = "scale.before_commit"
_COMMIT_PAUSE_S = 1.0
_LEAST_BYTES = 1 << 20

Act = Callable[[World, str], Awaitable[bool]]
"""Does the fault to a process, waits as long as it lasts and undoes it. False if there was nothing
that it could be done to."""


async def inject(world: World, scenario: Scenario) -> bool:
    """Make the faults of `scenario` happen; True once one at random is over, or, at a failpoint,
    once it is armed."""
    if isinstance(scenario.via, AtFailpoint):
        world.arm(scenario.via.file, scenario.via.content)
    fault = scenario.fault
    if isinstance(fault, AtFailpoint):
        world.arm(fault.file, fault.content)
        if isinstance(scenario.via, Occasion):
            await bring_about(world, scenario.via, fault)
        return True
    await asyncio.sleep(fault.after_s)
    return await _ACTS[fault.fault](world, fault.process)


def happened(world: World, scenario: Scenario) -> bool:
    """True of a fault at a failpoint once somebody came by; of one at random."""
    fault = scenario.fault
    return isinstance(fault, AtRandom) or not world.armed(fault.file)


async def undo(world: World) -> None:
    """Whatever a fault that was cut short may have left."""
    world.disarm()
    world.clock.write_text("+0")
    _filler(world).unlink(missing_ok=True)
    await asyncio.to_thread(world.etcd.heal)
    await asyncio.to_thread(world.etcd.revive)


async def _kill(world: World, process: str) -> bool:
    pid = await world.pid(process)
    if pid:
        os.kill(pid, signal.SIGKILL)
    return bool(pid)


async def _stop(world: World, process: str) -> bool:
    pid = await world.pid(process)
    if not pid:
        return False
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return True


async def _etcd_leader_killed(world: World, _: str) -> bool:
    leader = await asyncio.to_thread(world.etcd.leader)
    await asyncio.to_thread(world.etcd.kill, leader)
    await asyncio.sleep(FULL_S)
    await asyncio.to_thread(world.etcd.revive)
    return True


async def _etcd_quorum_lost(world: World, _: str) -> bool:
    members = world.etcd.members
    for member in members[: len(members) // 2 + 1]:
        world.etcd.unplug(member)
    await asyncio.sleep(QUORUM_LOST_S)
    await asyncio.to_thread(world.etcd.revive)
    return True


async def _partition(world: World, process: str) -> bool:
    world.etcd.partition(etcd_client(await world.actual(process)))
    await asyncio.sleep(PARTITION_S)
    world.etcd.heal()
    return True


async def _slow_disk(world: World, _: str) -> bool:
    for member in world.etcd.members:
        world.etcd.trace(member, "fdatasync,fsync:delay_enter=300ms")
    await asyncio.sleep(SLOW_S)
    await asyncio.to_thread(world.etcd.revive)
    return True


async def _etcd_disk_full(world: World, _: str) -> bool:
    leader = await asyncio.to_thread(world.etcd.leader)
    world.etcd.trace(leader, "fdatasync,fsync:error=ENOSPC")
    await asyncio.sleep(FULL_S)
    await asyncio.to_thread(world.etcd.revive)
    return True


async def _lease_lost(world: World, process: str) -> bool:
    """The lease of `process` is revoked while the coordinator is about to commit."""
    world.arm(_COMMIT, f"delay {_COMMIT_PAUSE_S:g}")
    for _ in range(200):
        if not world.armed(_COMMIT):
            break
        await asyncio.sleep(0.02)
    else:
        return False
    keys = world.deployment.keys
    key = keys.leader if process == "coordinator" else f"{keys.members}{process}"
    return await world.recorder.revoke_lease_of(key)


async def _clock_jump(world: World, _: str) -> bool:
    world.clock.write_text(JUMP)
    return True


async def _disk_full(world: World, _: str) -> bool:
    with suppress(OSError), _filler(world).open("wb") as filler:
        while True:
            filler.write(bytes(_LEAST_BYTES))
    with suppress(OSError), _filler(world).open("ab", buffering=0) as filler:
        while filler.write(b"0" * 512):
            pass
    await asyncio.sleep(FULL_S)
    _filler(world).unlink()
    return True


async def _out_of_memory(world: World, process: str) -> bool:
    """It gets no more address space than it has."""
    pid = await world.pid(process)
    if not pid:
        return False
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    full = pages * os.sysconf("SC_PAGESIZE") + _LEAST_BYTES
    hard = resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_AS, (full, hard))
    await asyncio.sleep(MEMORY_S)
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
    return True


async def _port_taken(world: World, _: str) -> bool:
    """The first coordinator starts again while somebody else listens where its API is to be."""
    pid = world.deployment.supervisor.pids["coordinator"]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    port = world.config.coordinator.api.port
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _attempt in range(100):
            try:
                taker.bind(("127.0.0.1", port))
                break
            except OSError:
                await asyncio.sleep(0.02)
        taker.listen()
        await asyncio.sleep(FULL_S)
    return True


def _filler(world: World) -> Path:
    return world.config.run_dir / "filler"


_ACTS: dict[Fault, Act] = {
    Fault.KILL: _kill,
    Fault.STOP: _stop,
    Fault.ETCD_LEADER_KILLED: _etcd_leader_killed,
    Fault.ETCD_QUORUM_LOST: _etcd_quorum_lost,
    Fault.PARTITION: _partition,
    Fault.SLOW_DISK: _slow_disk,
    Fault.ETCD_DISK_FULL: _etcd_disk_full,
    Fault.LEASE_LOST: _lease_lost,
    Fault.CLOCK_JUMP: _clock_jump,
    Fault.DISK_FULL: _disk_full,
    Fault.OUT_OF_MEMORY: _out_of_memory,
    Fault.PORT_TAKEN: _port_taken,
}
