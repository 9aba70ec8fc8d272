"""A whole deployment simulated from a seed: real coordinators and worker shells on a fake store,
fake agent and fake engines, in virtual time, with faults; and what must hold all the while.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from dataclasses import dataclass, field
from typing import Any

from dynamo_elastic import failpoints
from dynamo_elastic.config_sections import ScaleConfig
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import (
    Keys,
    MemberRecord,
    MemberState,
    TargetRecord,
    encode,
)
from dynamo_elastic.coordinator.status import Status, status_of
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.dynamo.registrations import Registrations
from dynamo_elastic.engine.base import Engine
from dynamo_elastic.testing.simulation_engine import Fabric
from dynamo_elastic.testing.simulation_faults import (
    PROCESS,
    Fault,
    Misfortune,
    Mishap,
    Process,
    ProcessStore,
    meet,
)
from dynamo_elastic.testing.simulation_invariants import Invariants, WatchedStore
from dynamo_elastic.testing.simulation_parts import (
    SimulatedAgent,
    SimulatedRegistrar,
    SufferingEngine,
)
from dynamo_elastic.testing.virtual_time import VirtualTimeLoop, wall_clock
from dynamo_elastic.topology import EngineShape
from dynamo_elastic.types import Incarnation, WorkerId
from dynamo_elastic.worker.base import ShellParts
from dynamo_elastic.worker.participant import Participant
from dynamo_elastic.worker.presence import Presence
from dynamo_elastic.worker.requests import RequestDesk
from dynamo_elastic.worker.shell import Shell

SLOTS = 4
CONFIG = ScaleConfig(
    initial_ranks=2,
    max_ranks=SLOTS,
    step_timeout_s=4,
    restore_timeout_s=6,
    drain_timeout_s=1,
    lease_ttl_s=3,
    operation_timeout_s=40,
    slots_timeout_s=15,
    quarantine_s=20,
)
COORDINATOR = "coordinator"
MISHAP_LASTS_S = CONFIG.step_timeout_s * 3
BACK_AFTER_S = 2.0
FAULTS_END_S = 60.0
SETTLE_S = 400.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run: everything in it follows from these values."""

    seed: int
    widths: tuple[int, ...]
    """Targets, asked for one after the other."""
    faults: tuple[tuple[str, str, str, int], ...]
    """Process, place, mishap and nth: the arguments of Fault."""
    slots_per_rank: int = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a schedule. `violations` is empty if every invariant held."""

    schedule: Schedule
    violations: tuple[str, ...]
    met: tuple[str, ...]
    """Places at which a fault has hit, in order."""
    committed: tuple[tuple[str, int], ...]
    """Source and width of every operation that was decided."""


def play(schedule: Schedule, *, coordinator: type[Coordinator] = Coordinator) -> Verdict:
    """Run one schedule. Never raises for what the deployment does: that is a violation."""
    rng = random.Random(schedule.seed)
    with asyncio.Runner(loop_factory=lambda: ShufflingLoop(rng)) as runner:
        world = SimulatedDeployment(schedule, rng, coordinator)
        try:
            failpoints.set_hook(meet)
            runner.run(world.run())
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is a violation
            world.invariants.violated(f"{type(exc).__name__}: {exc}")
        finally:
            failpoints.set_hook(None)
    seen = world.invariants
    met = tuple(world.misfortune.met)
    return Verdict(schedule, tuple(seen.violations), met, tuple(seen.committed))


class ShufflingLoop(VirtualTimeLoop):
    """Runs what is ready in another order now and then, as a busy machine does."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        if len(ready) > 1 and self._rng.random() < 0.2:
            ready.rotate(1)
        super()._run_once()  # type: ignore[misc]


@dataclass
class ShellProcess:
    """A worker shell that runs, and what can be seen of it."""

    process: Process
    presence: Presence
    registrar: SimulatedRegistrar
    task: asyncio.Task[None] = field(init=False)


class SimulatedDeployment:
    """Coordinator, shells, engines and one client that asks for widths."""

    def __init__(
        self, schedule: Schedule, rng: random.Random, coordinator: type[Coordinator]
    ) -> None:
        self.keys = Keys("sim")
        self.schedule = schedule
        self.rng = rng
        faults = [Fault(who, at, Mishap(what), nth) for who, at, what, nth in schedule.faults]
        self.misfortune = Misfortune(faults, MISHAP_LASTS_S)
        self.shells: dict[WorkerId, ShellProcess] = {}
        self.invariants = Invariants(self)
        self.fabric = Fabric(self.invariants.switched)
        self.store = WatchedStore(self.keys, self.invariants)
        self.agent = SimulatedAgent(SLOTS, self)
        self._coordinator = coordinator
        self._shape = EngineShape(num_experts=4, slots_per_rank=schedule.slots_per_rank)
        self._keepers: list[asyncio.Task[None]] = []
        self._seen = (0, Status())

    def boot_engine(self, slot: int, incarnation: Incarnation) -> str:
        SufferingEngine(WorkerId(f"slot{slot}"), incarnation, fabric=self.fabric)
        return incarnation

    def kill_engine(self, slot: int) -> None:
        """The engine of `slot` dies by itself, if there is one."""
        for engine in list(self.fabric.engines.values()):
            if engine.worker_id == f"slot{slot}":
                engine.die()
                self.agent.lose(slot)

    def engine(self, path: str) -> Engine:
        found = self.fabric.engines.get(Incarnation(path))
        if found is None:
            found = SufferingEngine(WorkerId("gone"), Incarnation(path))
            found.die()
        return found

    async def run(self) -> None:
        """Boot, ask for every width while faults happen, then expect it to heal."""
        names = [f"slot{k}" for k in range(SLOTS)]
        self._keepers = [self._spawn(self._keep_shell(slot, n)) for slot, n in enumerate(names)]
        self._keepers.append(self._spawn(self._keep_coordinator()))
        try:
            for number, width in enumerate(self.schedule.widths):
                await self.ask(f"r{number}", width)
                await self._until_quiet(FAULTS_END_S / len(self.schedule.widths))
            self.misfortune.over = True
            await self.expect_whole()
        finally:
            for task in self._keepers:
                task.cancel()
            for shell in self.shells.values():
                shell.process.crash()
            await asyncio.gather(*self._keepers, return_exceptions=True)

    async def ask(self, request_id: str, width: int) -> None:
        target = TargetRecord(request_id, width, "test", wall_clock())
        await self.store.txn([], [Put(self.keys.target, encode(target))])

    async def expect_whole(self) -> None:
        """Whatever happened: it comes to rest, and then any legal width can be had."""
        await self._must(self._rests, "it does not come to rest")
        await self._must(self._clean, "something is left")
        width = 2 if self.status().width != 2 else 3
        for attempt in range(2):
            await self.ask(f"last{attempt}", width)
            await self._must(lambda: self._answered(f"last{attempt}"), "no answer")  # noqa: B023
            if self.status().width == width:
                break
        await self._must(self._clean, "something is left of the last operation")
        if self.status().width != width:
            self.invariants.violated(f"{width} ranks can't be had: {self._describe()}")

    def status(self) -> Status:
        if self._seen[0] != self.store.revision:
            self._seen = self.store.revision, status_of(self.store.data.values(), self.keys)
        return self._seen[1]

    def _answered(self, request_id: str) -> bool:
        outcome = self.status().outcome
        return outcome is not None and outcome.request_id == request_id

    def _rests(self) -> bool:
        now = self.status()
        if now.operation is not None or now.target is None or now.in_force is None:
            return False
        whole = not now.lost_reasons() and now.withdrawn is None
        return whole and self._answered(now.target.request_id) and now.width == now.target.ranks

    def _clean(self) -> bool:
        return self._rests() and not self.invariants.at_rest()

    async def _until_quiet(self, timeout_s: float) -> None:
        for _ in range(int(timeout_s)):
            await asyncio.sleep(1.0)
            if self._rests():
                return

    async def _must(self, holds: Any, otherwise: str) -> None:
        for _ in range(int(SETTLE_S / 2)):
            if holds():
                return
            await asyncio.sleep(2.0)
        raise TimeoutError(f"{otherwise}: {self._describe()}")

    def _describe(self) -> str:
        now = self.status()
        members = {w: f"{m.state} {m.lost_reason}".strip() for w, m in now.members.items()}
        last = f"{now.last.operation_id} {now.last.phase} {now.last.failure}" if now.last else ""
        under_way = f"{now.operation.operation_id} {now.operation.phase}" if now.operation else ""
        left = self.invariants.at_rest()
        return f"{left}, width {now.width}, {members}, last {last}, now {under_way}, {now.notice}"

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        # Each keeper has a context of its own: the process that it keeps is set there.
        return asyncio.create_task(work, context=contextvars.copy_context())

    async def _keep_coordinator(self) -> None:
        while True:
            process = Process(COORDINATOR, self.misfortune)
            PROCESS.set(process)
            store = ProcessStore(self.store, process, self.rng)
            deployment = Deployment(self.keys, CONFIG, self._shape, now=wall_clock)
            await self._live(process, self._coordinator(store, deployment, "c").run())

    async def _keep_shell(self, slot: int, name: str) -> None:
        while True:
            process = Process(name, self.misfortune)
            PROCESS.set(process)
            await self._live(process, self._shell(slot, process).run(asyncio.Event()))

    async def _live(self, process: Process, work: Any) -> None:
        """Run a process until it crashes; return when it is to come back."""
        process.task = asyncio.create_task(work)
        await asyncio.wait({process.task})
        if not process.dead and not process.task.cancelled():
            self.invariants.violated(f"{process.name} ended: {process.task.exception()!r}")
        process.dead = True
        await asyncio.sleep(BACK_AFTER_S)

    def _shell(self, slot: int, process: Process) -> Shell:
        worker = WorkerId(process.name)
        store = ProcessStore(self.store, process, self.rng)
        registrar = SimulatedRegistrar(worker, self.invariants, process)
        parts = ShellParts(
            worker,
            slot,
            store,
            self.keys,
            self.agent,
            registrar,
            Registrations(store, "sim"),
            self.engine,
        )
        record = MemberRecord(worker, slot, "host", 1, MemberState.STANDBY)
        presence = Presence(store, self.keys, record)
        participant = Participant(parts, presence, RequestDesk(100))
        shell = Shell(parts, presence, participant, lease_ttl_s=CONFIG.lease_ttl_s)
        self.shells[worker] = ShellProcess(process, presence, registrar)
        return shell
