"""vLLM's coordinator of one operation with our waits: it looks every few milliseconds where vLLM's
waits up to 0.8 s, waits for nobody who leaves, and nobody who serves waits for long for a rank that
joins."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
from vllm.distributed.elastic_ep.external_elastic_ep import ExternalElasticEPScaleCoordinator
from vllm.v1.engine import ReconfigureDistributedRequest

from dynamo_elastic.engine.vllm.elastic.meeting import (
    GOES_BACK,
    RESUME,
    RESUMES,
    arrival_key,
    error_of,
    operation_of,
    resume_key,
)
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33.stores import connect, made_at
from dynamo_elastic.errors import EngineError

COMMITS, WITHDRAWN = "commit", "withdrawn"
"""What can become of an operation that all are ready for."""


class PatientCoordinator(ExternalElasticEPScaleCoordinator):  # type: ignore[misc]
    """Of the API process of one rank."""

    poll_s = ElasticSettings().poll_s

    prepared_scale: Any
    """vLLM's own: the operation that can be committed."""
    active_epoch: str | None
    """vLLM's own: the last operation that this rank has heard of."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._settings = ElasticSettings.from_environment()
        PatientCoordinator.poll_s = self._settings.poll_s
        self._leavers: tuple[Any, list[str]] | None = None
        self._old_server: Any = None
        self._next_store: Any = None
        """Rank 0's, for the operation that it begins next."""
        self._no_more: asyncio.Future[str] | None = None
        """Of a wait for rank 0's next operation: why it is over."""

    @staticmethod
    async def _sleep_with_backoff(backoff_step: int) -> int:
        await asyncio.sleep(PatientCoordinator.poll_s)
        return 0

    async def prepare(self, cur_data_parallel_size: int, new_data_parallel_size: int) -> None:
        await self._connect()
        await super().prepare(cur_data_parallel_size, new_data_parallel_size)

    async def _connect(self) -> None:
        """To all stores that vLLM would connect to with the loop standing still meanwhile, but for
        the one that rank 0 tells the others of."""
        parallel = self.client.vllm_config.parallel_config
        host = parallel.data_parallel_master_ip
        if parallel._coord_store_port:
            await connect(host, parallel._coord_store_port)
        if parallel.data_parallel_rank == 0:
            if self._next_store is None:
                self._next_store = await made_at(host)
            await connect(host, self._next_store.port)

    def _setup_reconfig_bootstrap(self) -> tuple[str, int]:
        """As vLLM's, with a store that is there already."""
        self.control_store_ref = getattr(self.client, "_coord_store", None)
        self.reconfig_store_ref, self._next_store = self._next_store, None
        host = self.client.vllm_config.parallel_config.data_parallel_master_ip
        return host, self.reconfig_store_ref.port

    def _verdict(self, store: Any, epoch: str, mine: str) -> str:
        """What becomes of an operation that all are ready for."""
        return _first_word(store, self.key(epoch, "verdict"), mine)

    async def _wait_for_commit_ready(self, prepared: Any, timeout_s: float = 0) -> None:
        """All have come to commit, and nobody has withdrawn it before that."""
        timeout_s = timeout_s or self._settings.prepare_timeout_s
        await super()._wait_for_commit_ready(prepared, timeout_s)
        store, epoch = prepared.reconfig_store, prepared.epoch
        if self._verdict(store, epoch, COMMITS) != COMMITS:
            raise RuntimeError("the commit was withdrawn")

    async def _see_last_operation_off(self) -> None:
        """Who left in the last operation has said so, and its handshake server is gone."""
        leavers, self._leavers = self._leavers, None
        if leavers is not None:
            store, keys = leavers
            loop = asyncio.get_running_loop()
            deadline_s = loop.time() + self._settings.group_timeout_s
            while not store.check(keys) and loop.time() < deadline_s:
                await asyncio.sleep(self.poll_s)
        server, self._old_server = self._old_server, None
        if server is not None:
            await asyncio.to_thread(server._thread.join, 5)

    async def _wait_for_bootstrap(self, store: Any, requested_new_dp_size: int, **_: Any) -> Any:
        """Rank 0's next operation, whatever became of the last."""
        missed = self._missed(store, requested_new_dp_size)
        timeout_s = self._settings.prepare_timeout_s
        if missed:
            timeout_s = min(timeout_s, self._settings.group_timeout_s)
        next_one = super()._wait_for_bootstrap(store, requested_new_dp_size, timeout_s)
        try:
            found = await self._unless_over(next_one)
        except TimeoutError as exc:
            if missed:
                raise EngineError(f"this rank came too late to it: {missed}") from exc
            raise
        _, bootstrap = found
        await connect(bootstrap.new_data_parallel_master_ip, bootstrap.coord_store_port)
        return found

    def _missed(self, store: Any, size: int) -> str:
        """Why the last operation failed, if this rank hears of it now, and it was for `size` ranks:
        what this rank waits for is that one, which is over, or else comes soon."""
        epoch, error = operation_of(store), error_of(store)
        if error is None or epoch == self.active_epoch:
            return ""
        self.active_epoch = epoch
        return error if bootstrap_of(store, epoch).new_data_parallel_size == size else ""

    async def _unless_over(self, wait: Coroutine[Any, Any, Any]) -> Any:
        """What `wait` returns. Raises EngineError when end_wait() comes first."""
        self._no_more = asyncio.get_running_loop().create_future()
        waited = asyncio.ensure_future(wait)
        try:
            await asyncio.wait([waited, self._no_more], return_when=asyncio.FIRST_COMPLETED)
            if not waited.done():
                raise EngineError(self._no_more.result())
            return waited.result()
        finally:
            waited.cancel()
            self._no_more = None

    def end_wait(self, reason: str) -> None:
        """Whoever waits here for rank 0's next operation goes, and leaves the way free for what has
        to be done now. Idempotent."""
        if self._no_more is not None and not self._no_more.done():
            self._no_more.set_result(reason)

    async def _wait_for_ready_ranks(
        self,
        control_store: Any,
        reconfig_store: Any,
        epoch: str,
        new_data_parallel_size: int,
        handshake_server: Any = None,
        timeout_s: float = 0,
    ) -> None:
        timeout_s = timeout_s or self._settings.prepare_timeout_s
        await super()._wait_for_ready_ranks(
            control_store, reconfig_store, epoch, new_data_parallel_size,
            handshake_server, timeout_s,
        )  # fmt: skip

    async def _wait_for_all_old_ranks(self, prepared: Any, timeout_s: float = 600) -> None:
        """Those who stay. Who leaves may take its time until the next operation."""
        target = prepared.bootstrap.new_data_parallel_size
        stay = min(prepared.cur_data_parallel_size, target)
        key = self.key
        left = range(stay, prepared.cur_data_parallel_size)
        if left:
            gone = [key(prepared.epoch, "shutdown_complete", rank) for rank in left]
            self._leavers = (prepared.reconfig_store, gone)
        wanted = [key(prepared.epoch, "old_rank_finished", rank) for rank in range(stay)]
        if not await self._are_set(prepared, wanted, timeout_s):
            raise TimeoutError(f"not every rank that stays finished in {timeout_s:g} s")

    async def _wait_for_local_reconfig_finished(self, *args: Any, **kwargs: Any) -> None:
        """The group of the operation is in force on all who stay, and who joins has come to resume:
        nobody who serves is to wait for it any more."""
        await super()._wait_for_local_reconfig_finished(*args, **kwargs)
        prepared = self.prepared_scale
        if prepared is None or not prepared.scale_up:
            return
        await self._wait_for_all_old_ranks(prepared)
        joined = range(prepared.cur_data_parallel_size, prepared.bootstrap.new_data_parallel_size)
        wanted = [arrival_key(RESUME, rank) for rank in joined]
        came = await self._are_set(prepared, wanted, self._settings.commit_timeout_s)
        word = RESUMES if came else GOES_BACK
        if _first_word(prepared.reconfig_store, resume_key(prepared.epoch), word) != RESUMES:
            raise TimeoutError(
                f"a rank that joined did not come in {self._settings.commit_timeout_s:g} s"
            )

    async def _are_set(self, prepared: Any, keys: list[str], timeout_s: float) -> bool:
        """Whether all of them are on the store of the operation in time. Raises RuntimeError if it
        has failed on another rank."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not prepared.reconfig_store.check(keys):
            error = self._get_error(prepared.control_store, prepared.epoch)
            if error is not None:
                raise RuntimeError(error)
            if loop.time() > deadline_s:
                return False
            await asyncio.sleep(self.poll_s)
        return True

    def _stop_handshake_server(self, server: Any, suppress_errors: bool) -> None:
        """Without standing still until its thread has seen it, which takes up to a second."""
        if server is None:
            return
        server._stop_event.set()
        self._old_server = server
        if not suppress_errors:
            server.raise_if_failed()


def bootstrap_of(store: Any, epoch: str) -> Any:
    """What rank 0 has said of an operation: a ReconfigureDistributedRequest."""
    said = store.get(PatientCoordinator.key(epoch, "bootstrap"))
    return msgspec.msgpack.decode(said, type=ReconfigureDistributedRequest)


def _first_word(store: Any, key: str, mine: str) -> str:
    """What all ranks go by: whatever the first of them has said there."""
    said: bytes = store.compare_set(key, "", mine)
    return said.decode()
