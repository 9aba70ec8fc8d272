"""The API process of a rank: vLLM's coordinator of one operation, and what becomes of one that
fails."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from vllm.entrypoints.serve.elastic_ep.middleware import (
    set_elastic_ep_rank_retired,
    set_scaling_elastic_ep,
)
from vllm.v1.engine import core_client

from dynamo_elastic.engine.vllm.elastic.guard import Stage
from dynamo_elastic.engine.vllm.elastic.meeting import EPOCH_KEY, error_of, publish_error
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33 import routes
from dynamo_elastic.engine.vllm.v0_33.stores import connect, store_in_force
from dynamo_elastic.engine.vllm.v0_33.waits import WITHDRAWN, PatientCoordinator
from dynamo_elastic.errors import EngineError

_log = logging.getLogger(__name__)
_UNDO_TIMEOUT_S = 30.0


class ElasticCoordinator(PatientCoordinator):
    """Prepares and commits as vLLM's does, and leaves the rank fit for the next operation when one
    fails."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        routes.install()  # Made before vLLM puts its routers into the application.
        self._early: list[str] | None = None
        """Failures told of before the operation that is being prepared is on the store; None while
        there is no such operation."""
        self.digest = ""
        """Of the weights that this rank got when it was attached last."""

    async def prepare(self, cur_data_parallel_size: int, new_data_parallel_size: int) -> None:
        self._early = []
        busy = self.prepared_scale is not None
        try:
            await self._see_last_operation_off()
            await super().prepare(cur_data_parallel_size, new_data_parallel_size)
        except BaseException as exc:
            if not busy:
                await self._undo(str(exc) or type(exc).__name__)
            raise
        finally:
            self._early = None

    def _prepare_reconfig_bootstrap(self, store: Any, *sizes: int) -> Any:
        """Rank 0's: from here on the others know of the operation, and can be told of its end."""
        made = super()._prepare_reconfig_bootstrap(store, *sizes)
        self._tell(store)
        return made

    async def _wait_for_bootstrap(self, store: Any, requested_new_dp_size: int, **_: Any) -> Any:
        """The same of the other ranks."""
        found = await super()._wait_for_bootstrap(store, requested_new_dp_size)
        self._tell(store)
        return found

    def _tell(self, in_force: Any, *more: str) -> None:
        """Failures that were told of, on all stores of the operation."""
        for reason in [*(self._early or ()), *more]:
            for store in (in_force, self.reconfig_store_ref):
                if store is not None:
                    publish_error(store, reason)

    async def commit(self) -> None:
        prepared = self.prepared_scale
        stays = prepared is not None and (
            prepared.scale_up or prepared.dp_rank < prepared.bootstrap.new_data_parallel_size
        )
        if stays:
            # Requests that come during the commit wait in the scheduler; vLLM would refuse them.
            set_scaling_elastic_ep(False)
        try:
            await super().commit()
        except BaseException as exc:
            if not stays:
                raise
            stage = await self._undo(str(exc) or type(exc).__name__)
            if stage == Stage.GIVEN_UP:
                await self._resume()
            elif prepared.scale_up and stage == Stage.DONE:
                await self._shrink_back(prepared)
            else:
                raise
            raise EngineError(f"the operation was undone: {exc}") from exc

    async def _shrink_back(self, failed: Any) -> None:
        """Those who served before go on without those who joined, of whom one died or stands still
        since the commit. Nobody holds an expert but they, and all of them rest."""
        before = failed.cur_data_parallel_size
        _log.error("a rank that joined did not come to resume: back to %d ranks", before)
        self._update_parallel_config(failed.bootstrap, failed.num_redundant_experts)
        if failed.dp_rank == 0:
            self.client._coord_store = self.reconfig_store_ref
        await self._shrink(failed.bootstrap.new_data_parallel_size, before)

    async def _shrink(self, size: int, to: int) -> None:
        """The first `to` ranks, who all rest and hold every expert, go on without the others."""
        await super().prepare(size, to)
        self.prepared_scale.cur_data_parallel_size = to
        await super().commit()
        set_scaling_elastic_ep(False)

    async def attach(self, place: dict[str, Any] | None = None) -> dict[str, float]:
        """This rank, which has left, joins the group that scales up to it; requests that come from
        now on wait for the commit. `place`: see elastic.place. Returns the seconds of each part.
        Raises RuntimeError if it did not come to be ready."""
        self._settings = ElasticSettings.from_environment()  # of a life after an image
        told = await self.client.call_utility_async("attach_elastic_ep", place or {})
        parallel = self.client.vllm_config.parallel_config
        parallel.eplb_config.num_redundant_experts = told["num_redundant_experts"]
        for name, value in told["parallel"].items():
            setattr(parallel, name, value)
        self.client.engine_ranks_managed = [parallel.data_parallel_rank]
        await connect(parallel.data_parallel_master_ip, parallel._coord_store_port)
        self._find_coordinator(told["addresses"])
        self.active_epoch = self.active_reconfig_store = None
        set_elastic_ep_rank_retired(False)
        self.digest = str(told["digest"])
        seconds: dict[str, float] = told["seconds"]
        return seconds

    def _find_coordinator(self, addresses: dict[str, str | None]) -> None:
        """A front end whose engine booted without a group hears of the DP coordinator now."""
        client = self.client
        if client.stats_update_address is None:
            client.coordinator_input_address = addresses["coordinator_input"]
            client.coordinator_output_address = addresses["coordinator_output"]
            client.stats_update_address = addresses["frontend_stats_publish_address"]
            client._ensure_stats_update_task()

    async def give_up(self, reason: str) -> None:
        """Nothing is prepared, here and on the other ranks. Idempotent."""
        prepared = self.prepared_scale
        self.tell_failure(reason)
        self.abort_prepared(reason)
        self.end_wait(reason)
        if prepared is not None:
            await self._undo(reason)

    def abort_prepared(self, reason: str) -> None:
        """Nothing can be committed, as far as this process knows. Idempotent."""
        super().abort(reason)

    async def withdraw(self, reason: str) -> bool:
        """give_up() of a commit that not every rank has come to, whoever of them comes yet; False
        if all have. Of a rank that joins, too."""
        prepared, parallel = self.prepared_scale, self.client.vllm_config.parallel_config
        store = prepared.reconfig_store if prepared is not None else store_in_force(parallel)
        epoch = prepared.epoch if prepared is not None else store.get(EPOCH_KEY).decode()
        if self._verdict(store, epoch, WITHDRAWN) != WITHDRAWN:
            return False
        self.tell_failure(reason)
        publish_error(store, reason)
        return True

    def abort(self, error: str) -> None:
        super().abort(error)
        task = asyncio.ensure_future(self._undo(error))
        task.add_done_callback(lambda t: t.exception())

    def tell_failure(self, reason: str) -> None:
        """End the operation that is being prepared, on all ranks: whoever watches the joiners knows
        that one is gone. Does nothing if there is none."""
        parallel = self.client.vllm_config.parallel_config
        in_force = store_in_force(parallel)
        if self._is_known(in_force):
            self._tell(in_force, reason)
        elif self._early is not None:
            self._early.append(reason)

    def _is_known(self, in_force: Any) -> bool:
        """Whether an operation is on the store, and not over."""
        if not in_force.check([EPOCH_KEY]) or error_of(in_force) is not None:
            return False
        return not in_force.check([self.key(in_force.get(EPOCH_KEY).decode(), "completed")])

    async def _undo(self, reason: str) -> str:
        """The stage of this rank's last operation after that; '' if there was none."""
        call = self.client.call_utility_async("abort_prepared_elastic_ep", reason)
        try:
            stage = str(await asyncio.wait_for(call, _UNDO_TIMEOUT_S))
        except Exception as exc:  # noqa: BLE001 - of whatever kind: the engine core did not undo it
            _log.error("the engine core did not give the operation up: %r", exc)
            return Stage.COMMITTED
        if stage == Stage.GIVEN_UP:
            self.active_reconfig_store = None
        return stage

    async def _resume(self) -> None:
        """Serving goes on on the old group, on all ranks: to resume is a collective of those that
        paused."""
        if await self.client.call_utility_async("is_scheduler_paused"):
            await asyncio.wait_for(self.client.resume_scheduler_async(), _UNDO_TIMEOUT_S)
        set_scaling_elastic_ep(False)


class ElasticClient(core_client.DPAsyncMPClient):  # type: ignore[misc]
    """vLLM's client of one rank's engine. It has statistics from the DP coordinator when it knows
    of one."""

    stats_update_address: str | None = None

    def _ensure_stats_update_task(self) -> None:
        if self.stats_update_address is not None:
            super()._ensure_stats_update_task()


def install(coordinator: type[ElasticCoordinator]) -> None:
    """vLLM makes ElasticClients, and they such coordinators, from now on."""
    core_client.ExternalElasticEPScaleCoordinator = coordinator
    core_client.DPAsyncMPClient = ElasticClient
