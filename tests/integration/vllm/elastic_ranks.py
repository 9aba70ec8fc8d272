"""Ranks of a group on vLLM 0.33's own code, in .venv-vllm-elastic: their busy loops, operations,
coordinators, handshakes and groups are vLLM's and ours; a step is a sleep, the model two tensors.

vLLM takes long to import, so one process does and every rank is a fork of it. Commands are JSON
lines on stdin ({"start": {...}}, {"to": RANK, "do": ...}, {"kill": RANK}), answers JSON lines on
stdout. A rank may have a fault: a place where it dies, or `stop-` and where it stands still, or
`late-` and where it takes its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import types
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec
import torch
import zmq
from torch._C._distributed_c10d import TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed import parallel_state, utils
from vllm.distributed.elastic_ep import elastic_state, standby_state
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EEP_NOTIFICATION_CALL_ID, EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.worker import dp_utils

import dynamo_elastic.engine.vllm.v0_33.executor  # puts our classes in place
import dynamo_elastic.engine.vllm.v0_33.worker  # noqa: F401 - the same, in the worker
from dynamo_elastic.dynamo.vllm_group import GroupEngine
from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.rpc import handlers
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.requests import Requests
from dynamo_elastic.engine.vllm.v0_33 import core as our_core
from dynamo_elastic.engine.vllm.v0_33 import groups as our_groups
from dynamo_elastic.engine.vllm.v0_33 import operation as our_operation
from dynamo_elastic.engine.vllm.v0_33 import stores
from dynamo_elastic.engine.vllm.v0_33.hooks import missing_hooks
from dynamo_elastic.engine.vllm.v0_33.rank_group import VllmRankGroup
from dynamo_elastic.engine.vllm.v0_33.scaling import ElasticScaling
from dynamo_elastic.engine.vllm.v0_33.survival import SurvivingCoordinator
from dynamo_elastic.errors import EngineError
from dynamo_elastic.types import Incarnation, WorkerId

STEP_S, SLOW_STEP_S = 0.004, 0.06
LATE_S = 1.5
FAULTY_STEP = 200
RECENT_S = 5.0


@functools.lru_cache(maxsize=4)  # vLLM's own keeps one
def _store_of_thread(host: str, port: int, _: int) -> Any:
    return utils.TCPStore(host, port, is_master=False, wait_for_workers=False)


def _store_at(host: str, port: int) -> Any:
    """The front end is a thread here, and vLLM's one client of a process is blocked by whoever
    waits."""
    if threading.current_thread() is threading.main_thread():
        return stores.store_at(host, port)
    return _store_of_thread(host, port, threading.get_ident())


def _connected(*args: Any, **kwargs: Any) -> Any:
    """A store or a client of one; the front end's loop may stand still for seconds meanwhile."""
    _mine["connects"] += int(threading.current_thread() is threading.main_thread())
    return TCPStore(*args, **kwargs)


utils.get_cached_tcp_store_client, utils.TCPStore = _store_at, _connected
HOST = "127.0.0.1"
EXPERTS = 4
GROUPS = ("world", "dp", "ep", "eplb")


_mine: dict[str, Any] = {"fault": "", "say": None, "connects": 0}
"""Of this fork: where it fails, how it answers, and what its loop stood still for."""


def fault(name: str) -> None:
    """Die, stand still or be late, if this is the place where this rank has to."""
    if _mine["fault"] == f"late-{name}":
        time.sleep(LATE_S)
    if _mine["fault"] == name:
        os._exit(9)
    if _mine["fault"] == f"stop-{name}":
        os.kill(os.getpid(), signal.SIGSTOP)


def patience() -> timedelta | None:
    """Of vLLM's flag --cpu-distributed-timeout-seconds, here PATIENCE_S."""
    given = os.environ.get("PATIENCE_S")
    return timedelta(seconds=float(given)) if given else None


def parallel_config(rank: int, size: int, port: int, rpc_port: int) -> Any:
    redundant = int(os.environ.get("REDUNDANT", EXPERTS))
    return types.SimpleNamespace(
        data_parallel_rank=rank, data_parallel_index=rank, data_parallel_rank_local=0,
        data_parallel_size=size,
        data_parallel_master_ip=HOST, data_parallel_master_port=0,
        _data_parallel_master_port_list=[], _coord_store_port=port, data_parallel_external_lb=True,
        data_parallel_rpc_port=rpc_port, enable_elastic_ep=True, elastic_ep_max_dp_size=4,
        use_all2all=False, all2all_backend="nixl_ep", cpu_distributed_timeout=patience(),
        eplb_config=types.SimpleNamespace(num_redundant_experts=redundant), world_size=1,
        tensor_parallel_size=1, enable_eplb=True,
        disable_nccl_for_dp_synchronization=True,
    )  # fmt: skip


class Scheduler:
    """Always has a request; a step makes its next token."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.tokens_s: list[float] = []
        self.requests: dict[str, Any] = {}
        self.resets = 0

    def reset_prefix_cache(self, *_: bool, **__: bool) -> bool:
        self.resets += 1
        return True

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def finish_requests(self, *_: Any) -> list[Any]:
        return []

    def has_unfinished_requests(self) -> bool:
        return self.pause_state is PauseState.UNPAUSED

    has_requests = has_unfinished_requests

    def get_request_counts(self) -> tuple[int, int]:
        return 1, 0


class Scaling(ElasticScaling):
    """The worker's part: real groups, real weights and map; no model that could be switched."""

    all2all = False

    def prepare_reconfiguration(self, request: Any, use_all2all: bool) -> None:
        self._wait_for_group_cleanup()
        self.reconfig_request = request
        with our_groups.operation(self._over):
            old = parallel_state.get_dp_group().world_size
            standby_state.create_standby_groups(
                new_dp_size=request.new_data_parallel_size,
                new_world_size_across_dp=request.new_data_parallel_size,
                master_ip=request.new_data_parallel_master_ip,
                coord_store_port=request.coord_store_port,
                use_all2all=use_all2all,
            )
            if request.new_data_parallel_size > old:
                self.transfer_weights(old, request.new_data_parallel_size)

    def prepare_new_worker(self) -> None:
        fault("stream")
        super().prepare_new_worker()

    def warmup_new_worker(self) -> None:
        fault("warm-up")

    def _run_async(self, method: str, *args: Any) -> None:
        self.execute(method, *args)

    def _renew_buffer(self) -> None:
        """There is none."""

    def _prepare_eplb_communicator(self, eplb_group: Any) -> None:
        """There is none."""

    def switch_and_prepare(self) -> tuple[Any, ...]:
        standby = standby_state.pop_standby_groups()
        retired: tuple[Any, ...] = parallel_state._replace_active_groups(**standby)
        return retired

    def switch_and_remove(self) -> None:
        self._wait_for_group_cleanup()
        retired = parallel_state._replace_active_groups(
            world=None, dp=None, ep=None, eplb=None, node_count=None
        )
        self._destroy_retired_groups(retired)

    def let_go(self) -> dict[str, Any]:
        self.worker.has_let_go = True
        return {}

    def broadcast_expert_mapping(self) -> None:
        group = standby_state.get_standby_dp_group()
        group.tcp_store_group.broadcast(torch.tensor(self.worker.mapping.shape), 0)
        group.broadcast(self.worker.mapping, 0)

    def _destroy_retired_groups(self, groups: Any) -> None:
        for group in groups:
            if group is not None:
                group.destroy()

    def _rebalance_soon(self) -> None:
        pass

    def placement(self) -> dict[str, Any]:
        """COMPLETE: how many first ranks have every expert."""
        return {"complete": int(os.environ.get("COMPLETE", "1")), "placement": "one"}

    def perform_scale_down_eplb_reshuffle(self, new_dp_size: int) -> None:
        pass


class Model(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        given = torch.randn(300, 7, generator=generator) if rank < 2 else torch.zeros(300, 7)
        self.dense = torch.nn.Parameter(given.t())  # not contiguous, as some of vLLM's are
        self.scales = torch.nn.Buffer(torch.arange(5) * int(rank < 2))
        self.expert_weights: list[list[torch.Tensor]] = []


class Executor:
    """Runs the worker's calls in this process."""

    is_sleeping = False
    has_let_go = False

    def __init__(self, rank: int, parallel: Any) -> None:
        self.mapping = torch.arange(EXPERTS).repeat(2, 1)
        self.received: torch.Tensor | None = None
        self.vllm_config = types.SimpleNamespace(parallel_config=parallel)
        self.rank, self.local_rank, self.device = 0, 0, torch.device("cpu")
        model = Model(rank)
        self.model = model
        self.model_runner = types.SimpleNamespace(
            get_model=lambda: model, setup_eplb_from_mapping=self._take
        )
        settings = ElasticSettings.from_environment()
        over = threading.Event()
        store = our_groups.meeting_at(HOST, parallel._coord_store_port, settings, over).store
        made = {}
        for name in GROUPS:
            ranks = [list(range(parallel.data_parallel_size))]
            made[name] = our_groups.SlimGroup(
                ranks, 0, "gloo", False, store, group_name=name, global_rank=rank,
                global_world_size=parallel.data_parallel_size,
            )  # fmt: skip
            if name == "world":
                parallel_state._WORLD = made[name]
                parallel_state._node_count(made[name].tcp_store_group)
        parallel_state._replace_active_groups(node_count=1, **made)
        self.scaling = Scaling(self)

    def _take(self, mapping: torch.Tensor) -> None:
        self.received = mapping

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), **_: Any) -> list[Any]:
        if method != "elastic_ep_execute":
            raise ValueError(method)
        return [self.scaling.execute(*args)]


class Core(our_core.ElasticEngineCore):
    """vLLM's engine core without its constructor, which boots a model."""

    def __init__(self, rank: int, parallel: Any, joins: bool) -> None:
        self.vllm_config = types.SimpleNamespace(parallel_config=parallel)
        self.engine_index, self.dp_sync_interval = rank, 16
        self.scheduler = Scheduler()
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self._idle_state_callbacks: list[Any] = []
        self.batch_queue = None
        self.step_counter = self.current_wave = 0
        self.pending_pause = self.ignore_start_dp_wave = self.reject_new_requests = False
        self.eep_scaling_state = None
        self.engines_running = not joins
        self.has_coordinator = self.publish_dp_lb_stats = False
        self.process_input_queue_block = True
        self.shutdown_state = EngineShutdownState.RUNNING
        self.enable_fault_tolerance = False
        self.available_gpu_memory_for_kv_cache = 1000 + rank
        self.output_thread = threading.current_thread()
        self._init_data_parallel(self.vllm_config)
        fault("engines")
        self.model_executor = Executor(rank, parallel)
        if joins:
            fault("groups")
            self._eep_scale_up_before_kv_init()

    def resume_scheduler(self) -> None:
        fault("resume")
        super().resume_scheduler()

    def _process_engine_step(self) -> bool:
        if not self.scheduler.has_unfinished_requests():
            return False
        time.sleep(SLOW_STEP_S if _mine["fault"] == "slow" else STEP_S)
        if self.step_counter == FAULTY_STEP:  # of all ranks, and not one at which they exchange
            fault("step")
            if _mine["fault"] == "sees-fault":
                raise RuntimeError("Fault detected in EP all2all communication")
        self._agree_on_batch()
        self.scheduler.tokens_s.append(time.monotonic())
        return True

    def execute_dummy_batch(self) -> None:
        time.sleep(STEP_S)
        self._agree_on_batch()

    def _agree_on_batch(self) -> None:
        """As vLLM's workers do in each step, and as its executor says that one has failed; not with
        BATCHES=0."""
        if os.environ.get("BATCHES") == "0" or self.dp_group is None:
            return
        try:
            dp_utils._run_ar(False, 1, 1, 0, self.vllm_config.parallel_config)
        except Exception as exc:  # torch's log of it has an error of its own
            raise RuntimeError(f"Worker failed with error '{exc}'") from exc

    def capture_iteration_details(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def _finish_pause(self, clear_cache: bool) -> None:
        """Nothing is cached."""


class State(our_operation.ElasticState):
    """vLLM's operation of one engine."""

    def _commit_new_dp_group(self) -> None:
        fault("commit")
        super()._commit_new_dp_group()

    def _mark_ready_for_switch(self) -> None:
        super()._mark_ready_for_switch()
        if self.worker_type == "new":
            fault("ready")


elastic_state.ElasticEPScalingState = State


class Client:
    """The API process's half: utility calls and notifications, without sockets between."""

    _coord_store: Any = None
    """Rank 0's, kept alive while it is in force."""

    def __init__(self, core: Core, parallel: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._core, self._loop = core, loop
        self.vllm_config = types.SimpleNamespace(
            parallel_config=parallel,
            model_config=types.SimpleNamespace(get_num_experts=lambda: EXPERTS),
        )
        self.coordinator_input_address = self.coordinator_output_address = "ipc:///none"
        self.input_address = self.output_address = self.stats_update_address = "ipc:///none"
        self.scale_send_socket = self
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.coordinator = SurvivingCoordinator(self)
        threading.Thread(target=self._pump, daemon=True).start()

    async def send(self, _: bytes) -> None:
        """To the DP coordinator, of which there is none."""

    def _ensure_stats_update_task(self) -> None:
        """There are no statistics."""

    def _eep_commit_pause_mode(self) -> str:
        return "keep"

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        args = tuple(msgspec.msgpack.decode(msgspec.msgpack.encode(args)))  # as over the wire
        future = self._loop.create_future()
        self._calls[id(future)] = future
        request = (0, id(future), method, args)
        self._core.input_queue.put((EngineCoreRequestType.UTILITY, request))
        return await future

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await self.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        await self.call_utility_async("resume_scheduler")

    def _pump(self) -> None:
        while True:
            _, outputs = self._core.output_queue.get()
            answer = getattr(outputs, "utility_output", None)
            if answer is not None:
                self._loop.call_soon_threadsafe(self._answer, answer)

    def _answer(self, answer: Any) -> None:
        if answer.call_id == EEP_NOTIFICATION_CALL_ID:
            told = self.coordinator.process_engine_core_notification(answer.result.result)
            self._loop.create_task(told)
            return
        future = self._calls.pop(answer.call_id)
        if answer.failure_message is not None:
            future.set_exception(RuntimeError(answer.failure_message))
        else:
            future.set_result(answer.result.result if answer.result is not None else None)


async def scale(core: Core, client: Client, size: int, early: str = "") -> dict[str, Any]:
    """What vLLM's own front end does for one rank; `early`: what it is told of before the others
    know of the operation."""
    began_s = time.monotonic()
    coordinator = client.coordinator
    if early:
        asyncio.get_running_loop().call_soon(coordinator.tell_failure, early)
        seen = iter((False, True))  # It waits for a leaver meanwhile.
        coordinator._leavers = (types.SimpleNamespace(check=lambda _: next(seen)), [])
    told = ""
    try:
        now = client.vllm_config.parallel_config.data_parallel_size
        await coordinator.prepare(now, size)
        await coordinator.commit()
        client.vllm_config.parallel_config.data_parallel_size = size
    except Exception as exc:  # noqa: BLE001 - the answer says what it was
        told = f"{type(exc).__name__}: {exc}"
    await asyncio.sleep(0.3)
    tokens_s = core.scheduler.tokens_s
    return {"error": told, "s": round(time.monotonic() - began_s - 0.3, 3), **facts(core)} | {
        "longest_gap_s": longest_gap_s(core, began_s - 0.2),
        "still_s": round(time.monotonic() - tokens_s[-1], 3) if tokens_s else None,
    }


async def attach(core: Core, client: Client) -> dict[str, Any]:
    """A rank that has left comes back."""
    torch.nn.init.zeros_(core.model_executor.model.dense)
    core.model_executor.model.scales.zero_()
    core.model_executor.received = None
    told = ""
    try:
        await client.coordinator.attach()
    except Exception as exc:  # noqa: BLE001 - the answer says what it was
        told = f"{type(exc).__name__}: {exc}"
    return {"error": told, "attached": True, **facts(core)}


class Engine:
    """The rank as our coordinator drives it: calls of the Engine protocol, by name."""

    def __init__(self, core: Core, client: Client) -> None:
        front = types.SimpleNamespace(
            external_eep_coordinator=client.coordinator,
            vllm_config=client.vllm_config,
            call_utility_async=client.call_utility_async,
        )
        self._executor = core.model_executor
        asked = types.SimpleNamespace(engine_core=front, collective_rpc=self._collective_rpc)
        self._group = VllmRankGroup(asked, member=True)
        self._lives = 0
        self._begin()

    def _begin(self) -> None:
        self._lives += 1
        attach = Attach(
            Incarnation(f"life{self._lives}"), WorkerId(f"w{self._group.rank}"), 1, "/dev/null"
        )
        made = GroupEngine(attach, self._group, self, Requests(), 64, self._rest)
        self._calls = handlers(made)

    async def _rest(self) -> None:
        """Parked, and back with another identity."""
        torch.nn.init.zeros_(self._executor.model.dense)
        self._executor.model.scales.zero_()
        self._begin()

    async def _collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        found: list[Any] = self._executor.collective_rpc(method, args)
        return found

    async def probe(self) -> tuple[int, ...]:
        return (1, 2)

    async def abort_all(self) -> None:
        """Nothing is under way."""

    async def call(self, command: dict[str, Any]) -> dict[str, Any]:
        name = command["name"]
        try:
            return {"call": name, "answer": await self._calls[name](command["params"]), "error": ""}
        except EngineError as exc:
            return {"call": name, "answer": None, "error": str(exc)}


def longest_gap_s(core: Core, since_s: float) -> float:
    """Between two tokens."""
    tokens_s = [t for t in core.scheduler.tokens_s if t > since_s]
    gaps = [b - a for a, b in itertools.pairwise(tokens_s)]
    return round(max(gaps, default=0.0), 3)


def facts(core: Core) -> dict[str, Any]:
    model = core.model_executor.model
    received = core.model_executor.received
    return {
        "width": core.dp_group.size() if core.dp_group is not None else 0,
        "tokens": len(core.scheduler.tokens_s),
        "recent_gap_s": longest_gap_s(core, time.monotonic() - RECENT_S),
        "resets": core.scheduler.resets,
        "connects": _mine["connects"],
        "scaling": core.eep_scaling_state is not None,
        "dense": float(model.dense.detach().sum()),
        "scales": int(model.scales.sum()),
        "mapping": received.tolist() if received is not None else None,
        "let_go": core.model_executor.has_let_go,
        "threads": len(os.listdir("/proc/self/task")) - pooled(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def pooled() -> int:
    """Threads of the loop's pool: they come as they are needed, up to a few, and stay."""
    return sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())


def join(parallel: Any) -> Any:
    """vLLM's handshake with rank 0; the socket says ready later."""
    address = f"tcp://{HOST}:{parallel.data_parallel_rpc_port}"
    identity = parallel.data_parallel_rank.to_bytes(2, "little")
    context = zmq.Context()
    sock = make_zmq_socket(context, address, zmq.DEALER, identity=identity, linger=1000, bind=False)
    Core.startup_handshake(sock, True, False, parallel)
    fault("hello")
    return sock


async def serve(core: Core, parallel: Any) -> None:
    loop = asyncio.get_running_loop()
    client = Client(core, copy.deepcopy(parallel), loop)
    threading.Thread(target=_loop, args=(core,), daemon=True).start()
    engine = Engine(core, client)
    _mine["connects"] = 0
    say({"up": parallel.data_parallel_rank})
    tasks = set()
    while True:
        command = await loop.run_in_executor(None, _mine["hear"])
        if command["do"] == "scale":
            task = loop.create_task(scale(core, client, command["width"], command.get("early", "")))
            task.add_done_callback(lambda done: say(done.result()))
            tasks.add(task)
        elif command["do"] == "attach":
            task = loop.create_task(attach(core, client))
            task.add_done_callback(lambda done: say(done.result()))
            tasks.add(task)
        elif command["do"] == "engine":
            task = loop.create_task(engine.call(command))
            task.add_done_callback(lambda done: say(done.result()))
            tasks.add(task)
        elif command["do"] == "tell-failure":
            client.coordinator.tell_failure(command["why"])
        else:
            say(facts(core))


def _loop(core: Core) -> None:
    try:
        core.run_busy_loop()
    except SystemExit:
        say({"left": core.engine_index})
    except BaseException as exc:  # noqa: BLE001 - this is what ends an engine
        traceback.print_exc()
        say({"died": core.engine_index, "of": f"{type(exc).__name__}: {exc}"[:300]})
        os._exit(3)


def say(words: dict[str, Any]) -> None:
    _mine["say"](words)


def live(seat: dict[str, Any], connection: Connection) -> None:
    """One rank, in its fork, until it is killed."""
    _mine.update(fault=seat.get("fault", ""), say=connection.send, hear=connection.recv)
    os.environ.update(seat.get("environment", {}))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    one = types.SimpleNamespace(world_size=1)
    parallel_state._TP = parallel_state._PP = parallel_state._PCP = one
    joins = bool(seat.get("joins"))
    os.environ["VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"] = str(int(joins))
    parallel = parallel_config(seat["rank"], seat["size"], seat["port"], seat["rpc_port"])
    sock = join(parallel) if joins else None
    core = Core(seat["rank"], parallel, joins)
    if sock is not None:
        sock.send(msgspec.msgpack.encode({"status": "READY", "local": True}))
    asyncio.run(serve(core, parallel))


class Ranks:
    """All forks: rank -> pid and connection."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[int, Connection]] = {}

    def run(self) -> None:
        """Pass words on until stdin ends."""
        self._out({"ready": True, "missing": missing_hooks()})
        while True:
            sources: list[Any] = [sys.stdin, *(c for _, c in self._alive.values())]
            for source in wait(sources):
                if source is sys.stdin:
                    line = os.read(0, 1 << 16).decode()
                    if not line:
                        return self.kill(list(self._alive))
                    for one in line.splitlines():
                        self._obey(json.loads(one))
                else:
                    self._hear(source)

    def _obey(self, command: dict[str, Any]) -> None:
        if "start" in command:
            self._start(command["start"])
        elif "kill" in command:
            self.kill([command["kill"]])
        else:
            self._alive[command["to"]][1].send(command)

    def _start(self, seat: dict[str, Any]) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for _, connection in self._alive.values():
                connection.close()
            ours.close()
            try:
                live(seat, theirs)
            except BaseException as exc:  # noqa: BLE001 - said, and then it ends
                theirs.send({"died": seat["rank"], "of": f"{type(exc).__name__}: {exc}"[:500]})
            os._exit(1)
        theirs.close()
        self._alive[seat["rank"]] = (pid, ours)

    def _hear(self, source: Any) -> None:
        rank = next(r for r, (_, c) in self._alive.items() if c is source)
        try:
            self._out({"from": rank, **source.recv()})
        except EOFError:
            pid, connection = self._alive.pop(rank)
            connection.close()
            os.waitpid(pid, 0)
            self._out({"from": rank, "gone": True})

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            if rank in self._alive:
                os.kill(self._alive[rank][0], signal.SIGKILL)

    def _out(self, words: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Ranks().run()
