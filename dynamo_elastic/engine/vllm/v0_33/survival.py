"""The API process of a rank whose joint step has failed: who lives goes on without who died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vllm import envs

from dynamo_elastic.engine.vllm.elastic.groups import open_store
from dynamo_elastic.engine.vllm.elastic.survivors import (
    FAULT_KEY,
    VERDICT_KEY,
    Word,
    decoded_verdict,
    decoded_word,
    encoded,
    judge,
    word_key,
)
from dynamo_elastic.engine.vllm.v0_33.client import ElasticCoordinator
from dynamo_elastic.engine.vllm.v0_33.faults import FAULT
from dynamo_elastic.engine.vllm.v0_33.stores import store_in_force
from dynamo_elastic.errors import EngineError

_LOOK_EVERY_S = 0.05
_log = logging.getLogger(__name__)


class SurvivingCoordinator(ElasticCoordinator):
    """Narrows the group to those who can go on, by vLLM's own scale-down without those who leave;
    or ends this rank, as vLLM would."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._operating = asyncio.Lock()
        self._survival: asyncio.Future[None] | None = None
        self._in_group = not envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
        self._failed_port = self._watched_port = 0
        """Of the last store on which a failed step was seen, and of the one that is looked at."""
        self._watched: Any = None
        with suppress(RuntimeError):  # without a loop there is nobody to go on
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def prepare(self, cur_data_parallel_size: int, new_data_parallel_size: int) -> None:
        async with self._operating:
            await super().prepare(cur_data_parallel_size, new_data_parallel_size)

    async def commit(self) -> None:
        async with self._operating:
            prepared = self.prepared_scale
            await super().commit()
            self._in_group = prepared.dp_rank < prepared.bootstrap.new_data_parallel_size

    async def attach(self, place: dict[str, Any] | None = None) -> dict[str, float]:
        found = await super().attach(place)
        self._in_group = True
        return found

    async def _watch(self) -> None:
        """A rank that has no step just now, or exchanges nothing in it, hears of a failed one."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._follow_store()
            port = self._watched_port
            if self._watched is None or port == self._failed_port:
                continue
            try:
                failed = self._watched.check([FAULT_KEY])
            except RuntimeError:
                self._failed_port = port  # rank 0 is gone, which the next step will tell
                continue
            if failed:
                self._failed_port = port
                reason = "a step of another rank has failed"
                await self.client.call_utility_async("fail_elastic_step", reason)

    async def _follow_store(self) -> None:
        """What is watched is the store of the group in force, if this rank is in one. Connected
        beside the loop, and not when it is needed: torch looks names of addresses up for that,
        which can take seconds."""
        parallel = self.client.vllm_config.parallel_config
        port = int(parallel._coord_store_port) if self._in_group else 0
        if port == self._watched_port:
            return
        self._watched, self._watched_port = None, port
        if port:
            host, timeout_s = parallel.data_parallel_master_ip, self._settings.group_timeout_s
            with suppress(RuntimeError):
                self._watched = await asyncio.to_thread(open_store, host, port, timeout_s)

    def _store(self) -> Any:
        """Of the group in force."""
        parallel = self.client.vllm_config.parallel_config
        if self._watched is not None and self._watched_port == parallel._coord_store_port:
            return self._watched
        return store_in_force(parallel)

    async def settled(self) -> None:
        """Return once no operation is under way, and nobody is to be done without."""
        await self.survived()
        async with self._operating:
            pass

    async def survived(self) -> None:
        """Return once nobody is to be done without: the operation that does that is nobody's to
        give up."""
        if self._survival is not None:
            await asyncio.wait([self._survival])

    async def process_engine_core_notification(self, notification_data: tuple[str, Any]) -> None:
        kind, said = notification_data
        if kind == FAULT:
            self._survival = asyncio.ensure_future(self._survive(decoded_word(said)))
        else:
            await super().process_engine_core_notification(notification_data)

    async def _survive(self, word: Word) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            self._give_operation_up()
            async with self._operating:
                before = int(self.client.vllm_config.parallel_config.data_parallel_size)
                size = await self._agreed_size(word)
                agreed_s = loop.time()
                async with asyncio.timeout(self._settings.group_timeout_s):
                    await self._shrink(before, size)
        except Exception as exc:  # noqa: BLE001 - of whatever kind: this rank has no group
            _log.error("this rank ends with its group: %r", exc)
            await self.client.call_utility_async("end_elastic_ep", f"the group ended: {exc}")
            return
        _log.warning(
            "%d of %d ranks go on: agreed in %.2f s, serve after %.2f s",
            *(size, before, agreed_s - began_s, loop.time() - began_s),
        )

    def _give_operation_up(self) -> None:
        """Whoever is at one here, or waits for us, goes; and all others hear of the step."""
        self._failed_port = self.client.vllm_config.parallel_config._coord_store_port
        with _store_of_rank_0():
            self._store().set(FAULT_KEY, "1")
            self.tell_failure("a step failed")
            self.abort_prepared("a step failed")
        self.end_wait("a step failed")

    async def _agreed_size(self, word: Word) -> int:
        """Of the group that goes on, with this rank. Raises EngineError if that does not."""
        parallel = self.client.vllm_config.parallel_config
        rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
        with _store_of_rank_0():
            store = self._store()
            store.set(word_key(rank), encoded(word))
            if rank == 0:
                words = await self._words(store, size)
                store.set(VERDICT_KEY, encoded(judge(size, words)))
            timeout_s = 3 * self._settings.fault_timeout_s
            if not await self._come(store, [VERDICT_KEY], timeout_s):
                raise EngineError(f"rank 0 did not say in {timeout_s:g} s who goes on")
            verdict = decoded_verdict(store.get(VERDICT_KEY))
        if rank >= verdict.size:
            others = f"{verdict.reason}, and ranks above it can't change their numbers"
            raise EngineError(others if verdict.size else verdict.reason)
        return verdict.size

    async def _words(self, store: Any, size: int) -> dict[int, Word]:
        """Of those who have said one in time."""
        await self._come(store, [word_key(r) for r in range(size)], self._settings.fault_timeout_s)
        there = [rank for rank in range(size) if store.check([word_key(rank)])]
        return {rank: decoded_word(store.get(word_key(rank))) for rank in there}

    async def _come(self, store: Any, keys: list[str], timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while not store.check(keys):
            if loop.time() > deadline_s:
                return False
            await asyncio.sleep(self.poll_s)
        return True


@contextmanager
def _store_of_rank_0() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:  # what torch makes of every failure of its store
        raise EngineError("rank 0 died, which keeps the group's store") from exc
