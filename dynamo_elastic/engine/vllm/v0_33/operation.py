"""One scale operation of one engine: vLLM's state machine, guarded and without its waits."""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import ReduceOp
from vllm.distributed.elastic_ep import elastic_state

from dynamo_elastic.engine.vllm.elastic.groups import (
    agree,
    close_beside,
    close_gloo,
    connect_gloo,
    open_store,
    reduce,
)
from dynamo_elastic.engine.vllm.elastic.guard import OVER, Guard, Stage
from dynamo_elastic.engine.vllm.elastic.meeting import (
    EPOCH_KEY,
    GivenUp,
    Meeting,
    error_of,
    operation_of,
    publish_error,
)
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33.groups import meeting_at

EXECUTE = "elastic_ep_execute"
"""vLLM's call of a worker's part, by the name of its method."""

_log = logging.getLogger(__name__)
_UpstreamState = elastic_state.ElasticEPScalingState


def connect_engines(
    parallel: Any, settings: ElasticSettings, over: threading.Event
) -> tuple[ProcessGroup, Any]:
    """The group of all engines of `parallel`, and its store. Raises GivenUp."""
    meeting = meeting_at(
        parallel.data_parallel_master_ip, parallel._coord_store_port, settings, over
    )
    rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
    meeting.meet("engines", rank, range(size))
    store: Any = meeting.store
    return connect_gloo(store, "engines", rank, size, settings.group_timeout_s), store


class ElasticState(_UpstreamState):  # type: ignore[misc, valid-type]
    """vLLM's operation of one engine. One that fails before its commit is undone on every rank."""

    # vLLM's own.
    worker_type: str
    new_dp_group: Any
    _prepare_future: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = ElasticSettings.from_environment()
        # No cycle: an engine core collects garbage seldom, and this holds threads and sockets.
        own = weakref.proxy(self)
        self.guard = Guard(own, own, parks=self.settings.park_leavers)
        self._over = threading.Event()
        self._done_keys: list[str] | None = None
        self._opening: Future[Any] | None = None
        if self.worker_type != "new":
            # Beside the steps: torch looks names of addresses up, which can take seconds.
            self._opening = self._prepare_executor.submit(
                self._open_store, self.new_parallel_config
            )

    def _open_store(self, parallel: Any) -> Any:
        return open_store(
            parallel.data_parallel_master_ip,
            parallel._coord_store_port,
            self.settings.group_timeout_s,
        )

    @property
    def _store(self) -> Any:
        """That of the operation; None while it is being opened. Raises RuntimeError if it can't
        be."""
        if self._opening is None or not self._opening.done():
            return None
        return self._opening.result()

    def progress(self) -> bool:
        if self.worker_type == "new":
            return bool(super().progress())
        moved = self.guard.progress(super().progress)
        if self.guard.stage is Stage.LEFT and self.worker_type == "removing":
            self.worker_type = "left"  # A busy loop ends with what is "removing".
            self.engine_core.leave_group()
            self._let_go()
        return moved

    def is_complete(self) -> bool:
        return self.guard.stage in OVER or bool(super().is_complete())

    def is_ready_for_switch(self) -> bool:
        return self.guard.stage not in OVER and bool(super().is_ready_for_switch())

    def _let_go(self) -> None:
        """Once those who stay have switched, and so disconnected from us. Should one of them not,
        our memory stays as it is, for it may still be in use."""
        if self._opening is None:
            return
        store = self._opening.result()
        epoch = store.get(EPOCH_KEY).decode()
        stay = range(self.new_parallel_config.data_parallel_size)
        finished = [f"elastic_ep/external/{epoch}/old_rank_finished/{rank}" for rank in stay]
        meeting = Meeting(store, timeout_s=self.settings.group_timeout_s)
        try:
            meeting.wait(finished)
        except GivenUp as exc:
            _log.error("this rank can't be parked: %s", exc)
            return
        _log.warning("left: %s", self._collective_rpc(EXECUTE, args=("let_go",)))

    # What the guard asks of its rank.

    def failure(self) -> str | None:
        try:
            store = self._store
            return error_of(store) if store is not None else None
        except RuntimeError as exc:
            return f"the store of the operation is gone ({str(exc).splitlines()[0][:120]})"

    def undo(self, reason: str) -> None:
        self._over.set()
        threading.Thread(target=self._tell, args=(reason,), daemon=True).start()
        self._collective_rpc(EXECUTE, args=("abort_prepared",))
        future, self._prepare_future = self._prepare_future, None
        if future is not None:
            future.add_done_callback(_close_result)
        self._prepare_executor.shutdown(wait=False)
        held = [self.new_dp_group]
        self.new_dp_group = None
        close_beside(held)

    def _tell(self, reason: str) -> None:
        """On the store of the operation and on the one in force: vLLM's coordinators look at both.
        By its name, which the first has: the second may know of the next operation by now."""
        try:
            own = self._open_store(self.new_parallel_config)
            operation = operation_of(own)
            publish_error(own, reason, operation)
            publish_error(self._open_store(self.vllm_config.parallel_config), reason, operation)
        except RuntimeError:
            _log.warning("a store is gone: nobody who waits there is told %s", reason)

    # Waits and groups.

    def _execute_async(self, execute_method: str, *args: Any) -> bool:
        if self._done_keys is None:
            self._done_keys = self._collective_rpc(
                EXECUTE, args=("start_async", execute_method, *args)
            )
        store = self._store
        if store is None or not store.check(self._done_keys):
            return False
        self._done_keys = None
        self._collective_rpc(EXECUTE, args=("clear_async",))
        return True

    def _init_new_dp_group(self) -> tuple[ProcessGroup, Any]:
        return connect_engines(self.new_parallel_config, self.settings, self._over)

    # The commit.

    def _commit_new_dp_group(self) -> None:
        """Nothing of the old group is given up before all who stay agree that the new one works."""
        engine, old = self.engine_core, self.old_dp_group
        values = [int(engine.engines_running), engine.current_wave, engine.step_counter]
        if self.scale_type == "scale_up":
            verdict = agree(
                old, self.new_dp_group, values,
                new_timeout_s=self.settings.commit_timeout_s,
                old_timeout_s=self.settings.group_timeout_s,
            )  # fmt: skip
            if not verdict.commits:
                raise GivenUp(verdict.reason)
            self.guard.commit()
            values = verdict.values
        else:
            values = reduce(self.new_dp_group, values, ReduceOp.MAX, self.settings.group_timeout_s)
        engine.join_group(self.new_dp_group, self.new_dp_store, values)
        close_gloo(old)

    def _commit_scale_down(self, removing: bool) -> None:
        self.guard.commit()  # Experts move, and the leavers do not vote.
        super()._commit_scale_down(removing)


def _close_result(future: Any) -> None:
    """Of a group that was made although nobody wants it any more."""
    if future.exception() is None and future.result() is not None:
        close_gloo(future.result()[0])


def install() -> None:
    """vLLM's engine cores make ElasticStates from now on."""
    elastic_state.ElasticEPScalingState = ElasticState
