"""vLLM's elastic group as one of its ranks, from its API process: the two halves of an operation
apart, and what rank 0 is at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.distributed.elastic_ep.external_elastic_ep import ExternalElasticEPScalePhase

from dynamo_elastic.engine.vllm.elastic.meeting import EPOCH_KEY, error_of
from dynamo_elastic.engine.vllm.group import Summons
from dynamo_elastic.engine.vllm.v0_33.operation import EXECUTE
from dynamo_elastic.engine.vllm.v0_33.stores import store_at, store_in_force
from dynamo_elastic.engine.vllm.v0_33.waits import bootstrap_of
from dynamo_elastic.errors import EngineError
from dynamo_elastic.types import Rank


class VllmRankGroup:
    """engine.vllm.group.RankGroup of an AsyncLLM, which stays with its owner."""

    def __init__(self, engine: Any, *, member: bool) -> None:
        """`member`: it booted together with its group."""
        self._engine = engine
        self._member = member

    @property
    def _coordinator(self) -> Any:
        return self._engine.engine_core.external_eep_coordinator

    @property
    def _parallel(self) -> Any:
        return self._engine.engine_core.vllm_config.parallel_config

    @property
    def rank(self) -> Rank:
        return Rank(self._parallel.data_parallel_rank)

    @property
    def size(self) -> int:
        return int(self._parallel.data_parallel_size) if self._member else 0

    async def prepare(self, size: int) -> None:
        """See RankGroup. Those who have gone on without a rank that died are that many already."""
        with self._told(f"prepare {size} ranks"):
            await self._coordinator.settled()
            if self.size != size:
                await self._coordinator.prepare(self.size, size)

    async def attach(self, rank: Rank, size: int) -> Mapping[str, float]:
        with self._told(f"join {size} ranks"):
            seconds: dict[str, float] = await self._coordinator.attach({"data_parallel_rank": rank})
        if self._parallel.data_parallel_size != size:
            raise EngineError(
                f"rank {rank}: the others prepare {self._parallel.data_parallel_size} ranks, "
                f"not {size}"
            )
        return seconds

    async def commit(self) -> None:
        size = self._coordinator.prepared_scale.bootstrap.new_data_parallel_size
        with self._told(f"commit {size} ranks"):
            await self._coordinator.commit()
        self._parallel.data_parallel_size = size
        self._member = self.rank < size

    async def serving(self) -> None:
        with self._told("serve"):
            while await self._engine.engine_core.call_utility_async("is_scheduler_paused"):
                await asyncio.sleep(self._coordinator.poll_s)
        self._member = True

    async def give_up(self, reason: str) -> None:
        with self._told("give up"):
            await self._coordinator.survived()
            await self._coordinator.give_up(reason)

    async def withdraw(self, reason: str) -> bool:
        with self._told("withdraw"):
            await self._coordinator.survived()
            return bool(await self._coordinator.withdraw(reason))

    def summons(self) -> Summons | None:
        with self._told("look at the store of rank 0"):
            return self._summons()

    def _summons(self) -> Summons | None:
        store = store_in_force(self._parallel)
        if not store.check([EPOCH_KEY]) or error_of(store) is not None:
            return None
        key, operation = self._coordinator.key, store.get(EPOCH_KEY).decode()
        if store.check([key(operation, "completed")]) or not store.check(
            [key(operation, "prepared")]
        ):
            return None
        bootstrap = bootstrap_of(store, operation)
        return Summons(
            operation, bootstrap.new_data_parallel_size, self._commits(operation, bootstrap)
        )

    def _commits(self, operation: str, bootstrap: Any) -> bool:
        """Rank 0 waits at the commit for all who have been there; or has made it."""
        store = store_at(bootstrap.new_data_parallel_master_ip, bootstrap.coord_store_port)
        key = self._coordinator.key
        if store.check([key(operation, "commit_ready", 0)]):
            return True
        phase = store.get(key(operation, "phase")).decode()
        return bool(phase == ExternalElasticEPScalePhase.COMMITTING)

    async def released(self) -> None:
        """The engine core answers when it has let go."""
        with self._told("let go"):
            await self._engine.engine_core.call_utility_async("is_scheduler_paused")

    async def digest(self) -> str:
        if not self._member:
            return str(self._coordinator.digest)  # its engine core waits for the others' commit
        with self._told("digest its weights"):
            (found,) = await self._engine.collective_rpc(EXECUTE, args=("digest",))
        return str(found)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """vLLM raises bare errors of many kinds for what happened in another process."""
        try:
            yield
        except EngineError:
            raise
        except Exception as exc:
            raise EngineError(f"rank {self.rank} could not {what}: {exc}") from exc
