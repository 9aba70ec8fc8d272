"""The worker's part of an operation: groups, graphs, memory and weights of one rank."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.elastic_ep import standby_state
from vllm.distributed.elastic_ep.elastic_execute import ElasticEPScalingExecutor
from vllm.distributed.eplb import eplb_state as eplb
from vllm.distributed.parallel_state import _replace_active_groups, get_dp_group, get_ep_group
from vllm.utils import is_moe_layer
from vllm.v1.worker import dp_utils

from dynamo_elastic.engine.vllm.elastic.laps import Laps
from dynamo_elastic.engine.vllm.elastic.placement import is_complete
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33 import alone, buffer, groups, moves
from dynamo_elastic.engine.vllm.v0_33.after_fault import RestingWorker
from dynamo_elastic.engine.vllm.v0_33.handshake import request_of
from dynamo_elastic.engine.vllm.v0_33.leaver import Leaver
from dynamo_elastic.engine.vllm.v0_33.weights import digest_of, replicated, sender_of, stream_of

_ABORT_WAIT_S = 0.2


class ElasticScaling(RestingWorker, ElasticEPScalingExecutor):  # type: ignore[misc]
    """The worker's part of an operation. All that takes long happens while the rank serves; a
    commit is a change of pointers, masks and maps."""

    all2all = True
    """Whether groups of experts dispatch; vLLM's own answer is no for a group of one."""
    _async_future: Any
    """vLLM's own: what its thread of preparations is at."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._settings = ElasticSettings.from_environment()
        self._over = threading.Event()
        self._leaver = Leaver(worker, rebinds=self._settings.rebind_graphs)

    # Before the commit, in the thread of vLLM's preparations.

    def prepare_reconfiguration(self, reconfig_request: Any, use_all2all: bool) -> None:
        with groups.operation(self._over):
            super().prepare_reconfiguration(reconfig_request, self.all2all)

    def start_async(self, execute_method: str, *args: Any, **kwargs: Any) -> str:
        self._over = threading.Event()
        return str(super().start_async(execute_method, *args, **kwargs))

    def _warm_target_groups(self, dp_group: Any, ep_group: Any) -> None:
        """Nothing in our groups needs it."""

    def transfer_weights(self, old_dp_size: int, new_dp_size: int) -> None:
        group = standby_state.get_standby_dp_group()
        group.tcp_store_group.broadcast(torch.tensor([old_dp_size]), 0)
        receivers = range(old_dp_size, new_dp_size)
        mine = [rank for rank in receivers if sender_of(rank, old_dp_size) == group.rank_in_group]
        tensors = self._replicated(self._model().expert_weights)
        for rank in mine:
            self._stream(group, rank).send(tensors)

    def prepare_new_worker(self) -> None:
        """The joiner's side of transfer_weights(), and of what follows it."""
        group = get_dp_group()
        group.tcp_store_group.broadcast(torch.empty(1, dtype=torch.int64), 0)  # how many send
        modules = [m for m in self._model().modules() if is_moe_layer(m)]
        tensors = self._replicated([m.get_expert_weights() for m in modules])
        self._stream(group, group.rank_in_group).receive(tensors)

    def _model(self) -> Any:
        return self.worker.model_runner.get_model()

    def _replicated(self, experts: Any) -> dict[str, torch.Tensor]:
        return replicated(self._model(), experts)

    def digest(self) -> str:
        """Of the weights that this rank has like all others."""
        return digest_of(self._replicated(self._model().expert_weights))

    def _stream(self, group: Any, joiner: int) -> Any:
        return stream_of(group, joiner, self.worker.device, self._settings.group_timeout_s)

    def abort_prepared(self) -> None:
        """Nothing of an operation that is over is left. Serving does not wait for it: what its
        thread is at ends at its next look at `_over`, or with its group's deadline, and the next
        operation comes after that."""
        self._over.set()
        future, self._async_future = self._async_future, None
        self._async_executor.submit(self._forget_prepared)
        if future is not None and not future.done():
            with suppress(TimeoutError):
                future.exception(timeout=_ABORT_WAIT_S)
        if future is None or future.done():
            buffer.let_go_of_staged_peers()

    def _forget_prepared(self) -> None:
        for group in standby_state.pop_standby_groups().values():
            if isinstance(group, groups.SlimGroup):
                group.destroy()
        self._prepared_eplb_communicator = None
        self._staged_moe_quant_methods.clear()

    # The commit.

    def _make_eep_moe_config(self, module: Any, dp_group: Any, ep_group: Any) -> Any:
        made = super()._make_eep_moe_config(module, dp_group, ep_group)
        if ep_group.world_size > 1:
            return made
        return alone.with_experts_of_its_own(made, module.moe_config)

    def switch_and_prepare(self) -> tuple[Any, ...]:
        retired: tuple[Any, ...] = super().switch_and_prepare()
        layers = [m for m in self._model().modules() if is_moe_layer(m)]
        alone.keep_expert_maps(layers, self.worker.device)
        self.expect_steps()
        return retired

    def expect_steps(self) -> None:
        """Nobody boots any more in the groups in force. Those of EPLB's thread are left alone: what
        it moves may take its time."""
        given = self.worker.vllm_config.parallel_config.cpu_distributed_timeout
        timeout = self._settings.step_timeout(given)
        for group in (get_dp_group(), get_ep_group()):
            group.expect_steps(timeout)

    def commit_scale_up(self, is_existing_worker: bool) -> None:
        """Experts come to the joiners later, in the background, by vLLM's own rebalancing."""
        retired: tuple[Any, ...] = ()
        if is_existing_worker:
            self.broadcast_expert_mapping()
            retired = self.switch_and_prepare()
        else:
            mapping = self.receive_expert_mapping()
            self.worker.model_runner.setup_eplb_from_mapping(mapping)
        self._rebalance_soon()
        if is_existing_worker:
            self._start_group_cleanup(retired)

    def _rebalance_soon(self) -> None:
        """All ranks count the same steps from here on, so all begin at the same one."""
        state = self._eplb()
        after = min(self._settings.rebalance_after_steps, state.expert_rearrangement_step_interval)
        state.expert_rearrangement_step = state.expert_rearrangement_step_interval - after
        moves.start_moves(state)

    def perform_scale_down_eplb_reshuffle(self, new_dp_size: int) -> None:
        """Where those who stay hold every expert already, nothing is moved."""
        state = self._eplb()
        state.drain_async()
        for model_state in state.model_states.values():
            held = model_state.physical_to_logical_map
            slots = held.shape[1] // get_ep_group().world_size * self._ranks(new_dp_size)
            if not is_complete(held, slots, model_state.model.num_logical_experts):
                super().perform_scale_down_eplb_reshuffle(new_dp_size)
                return
            eplb._commit_eplb_maps(model_state, held[:, :slots].cpu())
        state.expert_rearrangement_step = 0

    def switch_and_remove(self) -> None:
        """Out of all groups, which needs no peer. Graphs stay: whoever comes back needs them."""
        self._wait_for_group_cleanup()
        retired = _replace_active_groups(world=None, dp=None, ep=None, eplb=None, node_count=None)
        self._destroy_retired_groups(retired)

    def let_go(self) -> dict[str, Any]:
        """See Leaver. What rank 0 sends is not kept, nor are experts: those come by rebalancing."""
        self._prepared_eplb_communicator = None
        experts = self._model().expert_weights
        scratch = [t for s in self._eplb().model_states.values() for t in s.expert_buffer]
        sent = [*self._replicated(experts).values(), *(w for layer in experts for w in layer)]
        return self._leaver.let_go([*sent, *scratch])

    def detach(self) -> dict[str, Any]:
        """A rank that booted without a group, and has captured all, is as one that has left."""
        retired = _replace_active_groups(world=None, dp=None, ep=None, eplb=None, node_count=None)
        self._destroy_retired_groups(retired)
        return self.let_go()

    # A rank that has left comes back.

    def attach(self, told: dict[str, Any]) -> dict[str, float]:
        """Groups with the ranks that it joins, an expert buffer, and maps of their size; weights
        come with prepare_new_worker(), graphs with warmup_new_worker(). Returns seconds by part."""
        laps = Laps()
        self._settings = ElasticSettings.from_environment()  # of a life after an image
        self._leaver.map_memory()
        laps.mark("memory")
        dp_utils._skip_dp_coordination.set(False)
        config = self.worker.vllm_config
        parallel = config.parallel_config
        for name, value in told.items():
            setattr(parallel, name, value)
        self.reconfig_request = request_of(told)
        size = parallel.data_parallel_size
        rank = parallel.data_parallel_rank * parallel.world_size + self.worker.rank
        seat = groups.Seat(rank, size * parallel.world_size, self.worker.local_rank, "nccl")
        _replace_active_groups(world=seat, dp=seat, ep=None, eplb=None, node_count=1)
        self._over = threading.Event()
        with set_current_vllm_config(config), groups.operation(self._over):
            standby_state.create_standby_groups(
                new_dp_size=size,
                new_world_size_across_dp=size * parallel.world_size,
                master_ip=parallel.data_parallel_master_ip,
                coord_store_port=parallel._coord_store_port,
                use_all2all=self.all2all,
            )
            laps.mark("groups")
            self._renew_buffer()
            laps.mark("buffer")
            self._prepare_eplb_communicator(standby_state.get_standby_eplb_group())
            laps.mark("expert moves")
            self.switch_and_prepare()
            laps.mark("switch")
        return laps.s

    def warmup_new_worker(self) -> None:
        """A rank that comes back is warm; its graphs are captured again if they must be."""
        if not self._leaver.rebind():
            self.capture()

    def graphs(self) -> Any:
        """See Leaver."""
        return self._leaver.graphs()

    def capture(self) -> None:
        """Kernels are warm, and graphs captured; nobody else is asked for anything."""
        super().warmup_new_worker()

    def _renew_buffer(self) -> None:
        """All layers use a new buffer, which is connected to every rank."""
        communicator = standby_state.get_standby_ep_group().device_communicator
        self._use_buffer_of(communicator.all2all_manager)

    def _use_buffer_of(self, manager: Any) -> None:
        end = next(buffer.layer_ends(self._model()))
        buffer_of = manager.get_handle(
            {
                "max_num_tokens_per_dp_rank": end.max_tokens_per_rank,
                "token_hidden_size": self.worker.model_config.hf_text_config.hidden_size,
                "num_local_experts": end.expert_capacity // end.num_dispatchers(),
            }
        )
        buffer.use(self._model(), buffer_of)

    def _ranks(self, dp_size: int) -> int:
        return dp_size * int(self.worker.vllm_config.parallel_config.tensor_parallel_size)

    def _eplb(self) -> Any:
        return self.worker.model_runner.eplb_state
