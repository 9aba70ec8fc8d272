"""A deployment on one machine: brought up in order, taken down in reverse, nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dynamo_elastic.agent.client import AgentClient
from dynamo_elastic.agent.open_images import create_images, missing_slots
from dynamo_elastic.config import DeploymentConfig, engine_shape
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import Keys, OperationRecord, decode
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import Delete, Guard, Put, Store
from dynamo_elastic.dynamo.decisions import PlannerKeys
from dynamo_elastic.dynamo.watcher import PlannerWatcher, Widths
from dynamo_elastic.errors import ConfigError, ElasticError, GuardFailed, StoreError, StoreRefused
from dynamo_elastic.phases import Phase
from dynamo_elastic.serve import plan
from dynamo_elastic.serve.preflight import check_host, state_directory
from dynamo_elastic.serve.processes import ProcessSpec, Ready, Supervisor
from dynamo_elastic.serve.ready import http_ok, model_listed

log = logging.getLogger(__name__)

Say = Callable[[str], None]
Adapt = Callable[[ProcessSpec], ProcessSpec]
"""What is to be started, instead of what `serve` would start."""

_START_TIMEOUT_S = 30.0
_PLANNER_TIMEOUT_S = 90.0
_LOOK_AT_PLANNERS_S = 30.0
_OWNER_TTL_S = 10


@dataclass(slots=True)
class Deployment:
    """A running deployment and the handles to look into it. Owned by `running()`."""

    config: DeploymentConfig
    store: Store
    keys: Keys
    agent: AgentClient
    supervisor: Supervisor

    @property
    def timeline(self) -> Path:
        """One JSON line per phase event of every operation."""
        return self.config.state_dir / "timeline.jsonl"

    @property
    def url(self) -> str:
        return f"http://{self.config.frontend.host}:{self.config.frontend.port}"


class _Builder:
    """Starts processes and registers, right after each start, how it is undone."""

    def __init__(
        self, config: DeploymentConfig, stack: AsyncExitStack, say: Say, adapt: Adapt
    ) -> None:
        self.config = config
        self.stack = stack
        self.say = say
        self.adapt = adapt
        self.supervisor = Supervisor()

    async def launch(self, spec: ProcessSpec, ready: Ready | None, timeout_s: float) -> None:
        self.stack.push_async_callback(self.supervisor.stop, spec.name)
        await self.supervisor.start(self.adapt(spec), ready, timeout_s=timeout_s)


@asynccontextmanager
async def running(
    config: DeploymentConfig, say: Say, adapt: Adapt = lambda spec: spec
) -> AsyncIterator[Deployment]:
    """Bring a deployment up to its initial ranks; take all of it down on leaving. Tests `adapt`
    its processes.

    Raises ConfigError (nothing was started), or ElasticError if a part does not come up; what had
    been started is stopped again, newest first.
    """
    config = plan.absolute(config)
    num_experts = check_host(config)
    async with AsyncExitStack() as stack:
        state_dir = stack.enter_context(state_directory(config))
        builder = _Builder(config, stack, say, adapt)
        store, keys = await _open_store(builder), Keys(config.deployment)
        await _own(builder, store, keys)
        await _make_images(config, say)
        config_file = plan.config_file(config)
        config_file.write_text(config.model_dump_json(indent=2))
        (state_dir / "timeline.jsonl").unlink(missing_ok=True)
        agent = await _start_agent(builder, config_file)
        deployment = Deployment(config, store, keys, agent, builder.supervisor)
        if config.frontend.enabled:
            say("starting the frontend")
            ready = http_ok(f"{deployment.url}/health")
            await builder.launch(plan.frontend_spec(config), ready, _START_TIMEOUT_S)
        await _start_workers(builder, deployment, config_file, num_experts)
        if config.frontend.enabled:
            await model_listed(deployment.url, config.model.name, timeout_s=_START_TIMEOUT_S)
        if config.planner.enabled:
            await _start_planner(builder, deployment, num_experts)
        yield deployment
        say("stopping")


async def _make_images(config: DeploymentConfig, say: Say) -> None:
    if not (config.snapshot.enabled and config.snapshot.create_missing):
        return
    slots = missing_slots(config)
    if slots:
        say(f"making snapshots of warm engines for {len(slots)} slots")
        await asyncio.to_thread(create_images, config, slots, lambda slot, phase: None)


async def _open_store(builder: _Builder) -> Store:
    config = builder.config
    store, probe = EtcdStore.of(config.etcd), Keys(config.deployment).owner

    async def answers() -> None:
        while True:
            try:
                await store.get(probe)
            except StoreError:
                await asyncio.sleep(0.1)
            else:
                return

    if config.etcd.start:
        # A development etcd starts empty: what an earlier run left would be a dead topology.
        clear = partial(shutil.rmtree, config.state_dir / "etcd", ignore_errors=True)
        clear()
        builder.stack.callback(clear)
        await builder.launch(plan.etcd_spec(config), answers, _START_TIMEOUT_S)
    else:
        try:
            await store.get(probe)
        except StoreRefused as exc:
            raise ConfigError([f"etcd.endpoints: {exc}"]) from exc
        except StoreError as exc:
            urls = ", ".join(config.etcd.urls)
            raise ConfigError(
                [f"etcd.endpoints: no etcd answers at {urls}; check the address, start etcd"]
            ) from exc
    builder.stack.push_async_callback(store.close)
    return store


async def _own(builder: _Builder, store: Store, keys: Keys) -> None:
    """Claim the etcd prefix, and clear what an earlier run left under it; clear it on leaving."""
    session = await Session.open(store, ttl_s=_OWNER_TTL_S)
    builder.stack.push_async_callback(session.close)
    me = str(builder.config.state_dir).encode()
    try:
        await store.txn([Guard(keys.owner, 0)], [Put(keys.owner, me, session.lease)])
    except GuardFailed as exc:
        owner = await store.get(keys.owner)
        where = owner.value.decode() if owner else "another serve"
        raise ConfigError(
            [
                f"deployment: etcd prefix {keys.prefix} is in use by {where}; "
                "stop that one or choose another name"
            ]
        ) from exc
    await _clear(store, keys)
    builder.stack.push_async_callback(_clear, store, keys)


async def _clear(store: Store, keys: Keys) -> None:
    """Delete every key of the deployment but the owner's."""
    stored = await store.get_prefix(keys.prefix)
    gone = [Delete(v.key) for v in stored if v.key != keys.owner]
    if gone:
        await store.txn([], gone)


async def _start_agent(builder: _Builder, config_file: Path) -> AgentClient:
    agent = AgentClient(builder.config.agent_socket)

    async def answers() -> None:
        while True:
            try:
                await agent.slots()
            except ElasticError:
                await asyncio.sleep(0.05)
            else:
                return

    spec = plan.agent_spec(builder.config, config_file)
    await builder.launch(spec, answers, _START_TIMEOUT_S)
    builder.stack.push_async_callback(agent.close)
    for slot in await agent.slots():
        if slot.pid:  # a `serve` that was killed left it behind
            await agent.stop_engine(slot.slot, slot.incarnation)
    builder.stack.push_async_callback(agent.stop_all)
    return agent


async def _start_workers(
    builder: _Builder, deployment: Deployment, config_file: Path, num_experts: int
) -> None:
    config = builder.config
    builder.say(f"starting {config.scale.max_ranks} worker shells and the coordinator")
    for slot in range(config.scale.max_ranks):
        spec = plan.shell_spec(config, config_file, slot)
        await builder.launch(spec, None, _START_TIMEOUT_S)
    await _all_on_standby(deployment)
    builder.say(f"bringing up {config.scale.initial_ranks} ranks")
    spec = plan.coordinator_spec(config, config_file, str(num_experts))
    # The operation has its own deadline, and says what failed.
    boot_timeout_s = config.scale.operation_timeout_s + _START_TIMEOUT_S
    await builder.launch(spec, lambda: _booted(deployment), boot_timeout_s)


async def _start_planner(builder: _Builder, deployment: Deployment, num_experts: int) -> None:
    config, supervisor = builder.config, builder.supervisor
    spec = plan.planner_spec(config)
    if config.planner.start:
        builder.say("starting the planner")
        ready = http_ok(f"http://127.0.0.1:{config.planner.control_port}/v1/min-endpoints")
        await builder.launch(spec, ready, _PLANNER_TIMEOUT_S)

    async def start_over(reason: str) -> None:
        # The planner waits for the width that it wanted, and for nothing else, until it is new.
        if config.planner.start:
            await supervisor.restart(spec.name)
        else:
            builder.say(f"the planner waits until it is started anew: {reason}")

    watcher = PlannerWatcher(
        deployment.store,
        deployment.keys,
        PlannerKeys(config.namespace),
        Widths(engine_shape(config, num_experts), config.scale.limits, config.scale.max_ranks),
        on_unreached=start_over,
        on_gone=start_over,
        look_every_s=_LOOK_AT_PLANNERS_S,
        rivals_after_s=1.5 * config.workers.lease_ttl_s,
    )
    watching = asyncio.create_task(watcher.run())
    watching.add_done_callback(supervisor.report)
    builder.stack.callback(watching.cancel)


async def _all_on_standby(deployment: Deployment) -> None:
    """Return once every shell is a member, so that the first ranks are the first slots."""
    shells = deployment.config.scale.max_ranks
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while len(await deployment.store.get_prefix(deployment.keys.members)) < shells:
                await asyncio.sleep(0.05)
    except TimeoutError as exc:
        logs = deployment.config.state_dir / "logs"
        raise ElasticError(
            f"not every worker shell came up in {_START_TIMEOUT_S:g} s; see {logs}"
        ) from exc


async def _booted(deployment: Deployment) -> None:
    """Return once the first operation has ended well. Raises ElasticError if it was aborted."""
    while True:
        stored = await deployment.store.get(deployment.keys.last)
        if stored is not None:
            last = decode(OperationRecord, stored.value)
            if last.phase is Phase.DONE:
                return
            raise ElasticError(f"the first ranks did not come up: {last.failure}")
        await asyncio.sleep(0.1)
