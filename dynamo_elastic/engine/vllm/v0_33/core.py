"""The engine core of a rank: its group of engines, and what it does when that changes."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ReduceOp
from vllm import envs
from vllm.distributed.utils import cpu_all_reduce_
from vllm.v1.engine import ReconfigureDistributedRequest, core

from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.vllm.elastic.groups import close_gloo, reduce
from dynamo_elastic.engine.vllm.elastic.guard import Stage
from dynamo_elastic.engine.vllm.elastic.laps import Laps
from dynamo_elastic.engine.vllm.elastic.meeting import (
    RESUME,
    RESUMES,
    GivenUp,
    Meeting,
    arrival_key,
    operation_of,
    resume_key,
)
from dynamo_elastic.engine.vllm.elastic.place import parallel_of
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33 import handshake
from dynamo_elastic.engine.vllm.v0_33.faults import RestingCore
from dynamo_elastic.engine.vllm.v0_33.operation import EXECUTE, ElasticState, connect_engines
from dynamo_elastic.errors import EngineError


class ElasticEngineCore(RestingCore, core.DPEngineCoreProc):  # type: ignore[misc]
    """A DPEngineCoreProc whose operations end well or change nothing, and which outlives peers."""

    eep_scaling_state: Any
    """vLLM's own: the operation that is under way."""
    dp_group: Any
    engine_index: int
    available_gpu_memory_for_kv_cache: int
    _hurry = False
    _step_timeout = timedelta(0)
    _last: ElasticState | None = None
    """The last operation, also when it is over."""

    def _init_data_parallel(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if not (parallel.enable_elastic_ep and parallel._coord_store_port):
            super()._init_data_parallel(vllm_config)
            return
        self.dp_rank, self.dp_size = parallel.data_parallel_rank, parallel.data_parallel_size
        settings = ElasticSettings.from_environment()
        self.dp_group, self.dp_store = connect_engines(parallel, settings, threading.Event())

    def run_busy_loop(self) -> None:
        self._expect_steps(ElasticSettings.from_environment())
        self.model_executor.collective_rpc(EXECUTE, args=("expect_steps",))
        super().run_busy_loop()

    def _expect_steps(self, settings: ElasticSettings) -> None:
        """Nobody boots any more in the group in force."""
        given = self.vllm_config.parallel_config.cpu_distributed_timeout
        self._step_timeout = settings.step_timeout(given)

    def join_group(self, group: ProcessGroup, store: Any, values: list[int]) -> None:
        """`group` is in force; `values` are running, wave and step that its ranks agreed on."""
        self.dp_group, self.dp_store, self.dp_rank = group, store, group.rank()
        running, self.current_wave, self.step_counter = values
        self.engines_running, self._hurry = bool(running), False
        self.rests = False

    def leave_group(self) -> None:
        """This engine steps no more, and answers calls alone."""
        close_gloo(self.dp_group)
        self.dp_group = self.dp_store = None
        self.engines_running = self.pending_pause = False

    def attach_elastic_ep(self, place: dict[str, Any]) -> dict[str, Any]:
        """A rank that has left joins the group that scales up to it, as a joiner of vLLM's does;
        serving starts with the commit. `place`: see elastic.place. Returns what its front end has
        to know, and under "seconds" where the time went. A utility call. Raises EngineError, and is
        out of any group, if it does not come to be ready."""
        if self.dp_group is not None:
            raise EngineError(f"rank {self.engine_index} is in a group")
        parallel = self.vllm_config.parallel_config
        for name, value in parallel_of(place).items():
            setattr(parallel, name, value)
        self.engine_index = parallel.data_parallel_rank
        self._forget_keys()
        own_bytes = self.available_gpu_memory_for_kv_cache
        laps = Laps()
        try:
            with handshake.greeted(parallel, self.engine_index) as addresses:
                laps.mark("handshake")
                self.follow_coordinator(addresses)
                self._init_data_parallel(self.vllm_config)
                laps.mark("engines")
                told = {name: getattr(parallel, name) for name in handshake.TOLD}
                (worker,) = self.model_executor.collective_rpc(EXECUTE, args=("attach", told))
                laps.mark("worker")
                self._eep_scale_up_before_kv_init()
                laps.mark("weights")
                # Now, for it answers nobody any more until the others have committed.
                (digest,) = self.model_executor.collective_rpc(EXECUTE, args=("digest",))
                laps.mark("digest")
        except Exception as exc:
            self.eep_scaling_state = None
            self.leave_group()
            self.model_executor.collective_rpc(EXECUTE, args=("switch_and_remove",))
            raise EngineError(f"rank {self.engine_index} did not join: {exc}") from exc
        # It has a KV cache already, whatever room there is on the other ranks.
        self.available_gpu_memory_for_kv_cache = own_bytes
        redundant = parallel.eplb_config.num_redundant_experts
        seconds = laps.s | {f"worker: {part}": s for part, s in worker.items()}
        found = {name: getattr(addresses, name) for name in handshake.ADDRESSES}
        return {
            "parallel": told,
            "num_redundant_experts": redundant,
            "addresses": found,
            "digest": digest,
            "seconds": seconds,
        }

    def _forget_keys(self) -> None:
        """Nothing is taken for cached: its KV cache may have been unmapped meanwhile, and other
        weights than those it was filled with may come."""
        if not self.reset_prefix_cache():
            raise EngineError(f"rank {self.engine_index} has requests, and can't join a group")

    def renew_elastic_ep(self, attach: dict[str, Any]) -> None:
        """This process has the identity of `attach`. A utility call."""
        renew(msgspec.convert(attach, Attach))
        envs.disable_envs_cache()

    def follow_coordinator(self, addresses: Any) -> None:
        """It was followed from the start."""

    def _has_global_unfinished_reqs(self, local_unfinished: bool) -> bool:
        """As vLLM's, with a third number: while any rank scales or pauses, all exchange at every
        step, so that a pause takes one step and not sixteen."""
        if self.dp_group is None:
            return False
        self.step_counter += 1
        every = 1 if self._hurry else self.dp_sync_interval
        if self.step_counter != 1 and self.step_counter % every != 0:
            return True
        hurry = self.eep_scaling_state is not None or self.pending_pause
        words = torch.tensor(
            [int(local_unfinished), int(self.pending_pause), int(hurry)], dtype=torch.int32
        )
        cpu_all_reduce_(words, self.dp_group, timeout=self._step_timeout)
        unfinished, pausing, hurrying = words.tolist()
        size = self.dp_group.size()
        self._hurry = hurrying > 0
        if pausing == size:
            self.ignore_start_dp_wave, self.pending_pause = True, False
        return bool(unfinished > 0 or pausing % size != 0)

    def _pause_complete(self) -> bool:
        """An engine that rests already, since nobody could resume, has nothing to agree on."""
        return (self.ignore_start_dp_wave and not self.engines_running) or bool(
            super()._pause_complete()
        )

    def resume_scheduler(self) -> None:
        """As vLLM's, which waits half an hour for a rank that stands still. Raises RuntimeError if
        one did not come in time; this engine rests on then."""
        if self.rests:
            raise EngineError("a step failed: this rank has no group that could resume")
        if self.dp_group is not None and not self.engines_running and not self.pending_pause:
            settings = ElasticSettings.from_environment()
            if self.eep_scaling_state is not None:
                self._join(settings)
            reduce(self.dp_group, [0], ReduceOp.MAX, settings.group_timeout_s)
            self._expect_steps(settings)
        super().resume_scheduler()

    def _join(self, settings: ElasticSettings) -> None:
        """Those who serve know that this rank, which joins, is here, and are about to resume.
        Raises GivenUp, and ends the engine with that, if they have gone on without it."""
        self.dp_store.set(arrival_key(RESUME, self.dp_rank), "1")
        said = resume_key(operation_of(self.dp_store))
        meeting = Meeting(self.dp_store, timeout_s=settings.group_timeout_s, poll_s=settings.poll_s)
        meeting.wait([said])
        if self.dp_store.get(said).decode() != RESUMES:
            raise GivenUp("this rank came too late to resume")

    def reinitialize_distributed(self, reconfig_request: Any) -> str:
        self._clear_failed()
        if not isinstance(reconfig_request, ReconfigureDistributedRequest):
            # vLLM makes it of what came over the wire by a method's annotations, which are strings
            # in this module.
            reconfig_request = msgspec.convert(reconfig_request, ReconfigureDistributedRequest)
        key = str(super().reinitialize_distributed(reconfig_request))
        self._last = self.eep_scaling_state
        return key

    def abort_prepared_elastic_ep(self, reason: str) -> str:
        """Give the last operation up if it is not committed; its stage after that, or '' if there
        never was one. A utility call."""
        if self._last is None:
            return ""
        stage = self._last.guard.give_up(reason)
        self._clear_failed()
        return stage.value

    def _clear_failed(self) -> None:
        """An operation that is over leaves the way free for the next."""
        state = self.eep_scaling_state
        if state is not None and state.guard.stage is Stage.GIVEN_UP:
            self.eep_scaling_state = None
            self.process_input_queue_block = True


def install(made: type[ElasticEngineCore]) -> None:
    """vLLM makes engine cores of that class from now on."""
    core.DPEngineCoreProc = made


# The engine core converts what comes over the wire by these; annotations here are strings.
ElasticEngineCore.reinitialize_distributed.__annotations__["reconfig_request"] = (
    ReconfigureDistributedRequest
)
