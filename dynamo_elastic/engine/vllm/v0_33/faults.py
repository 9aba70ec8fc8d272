"""An engine core whose joint step has failed: it throws the step away and rests, until its front
end knows who goes on. vLLM's ends, and so do all others.

A step fails here when a peer's socket closes, or when the worker sees that NIXL EP has masked a
peer. Whoever sees it closes its own sockets in turn, so that nobody waits for long.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EEP_NOTIFICATION_CALL_ID, EngineCoreOutputs, UtilityOutput
from vllm.v1.serial_utils import UtilityResult

from dynamo_elastic.engine.vllm.elastic.groups import Numbers, close_gloo
from dynamo_elastic.engine.vllm.elastic.guard import Stage
from dynamo_elastic.engine.vllm.elastic.survivors import Word, encoded
from dynamo_elastic.engine.vllm.v0_33.operation import EXECUTE
from dynamo_elastic.errors import EngineError

FAULT = "STEP_FAILED"
"""Kind of the notification that tells the front end; with it goes a survivors.Word."""
_log = logging.getLogger(__name__)


class RestingCore:
    """Mixed into vLLM's DPEngineCoreProc, before it."""

    # vLLM's own.
    batch_queue: Any
    current_wave: int
    dp_group: Any
    dp_rank: int
    eep_scaling_state: Any
    engine_index: int
    has_coordinator: bool
    model_executor: Any
    output_queue: Any
    scheduler: Any

    _last: Any
    """Of ElasticEngineCore."""
    rests = False
    """A step has failed, and no other group is in force yet."""
    _end_reason = _failed_elsewhere = ""

    def run_busy_loop(self) -> None:
        """As vLLM's, and after a step that failed for want of a peer once more."""
        while True:
            try:
                super().run_busy_loop()  # type: ignore[misc]
            except RuntimeError as exc:  # of gloo, and of a worker that has seen a fault
                if not self._can_rest():
                    raise
                _log.error("a joint step failed, and is thrown away: %s", exc)
            # Not above: what failed holds on to the group, and so to its sockets.
            self._rest()

    def _can_rest(self) -> bool:
        group, state = self.dp_group, self.eep_scaling_state
        if self.rests or group is None or group.size() < 2:
            return False
        if getattr(self.model_executor, "is_failed", False):
            return False
        if state is None:
            return True
        undone = state.worker_type == "existing" and state.guard.give_up("a step failed")
        return bool(undone == Stage.GIVEN_UP)

    def _rest(self) -> None:
        """Raises RuntimeError if its own worker is not well."""
        self.rests = True
        self._throw_step_away()
        self.eep_scaling_state = None
        self.process_input_queue_block = True
        self.engines_running = self.pending_pause = False
        self.ignore_start_dp_wave = True
        self.step_counter = 0
        if self.has_coordinator and self.dp_rank == 0:  # as when a wave ends
            self._tell(-1, EngineCoreOutputs(wave_complete=self.current_wave))
        self.current_wave += 1
        self._let_go_of_group()
        (said,) = self.model_executor.collective_rpc(EXECUTE, args=("rest",))
        result = UtilityResult((FAULT, encoded(Word(**said))))
        told = UtilityOutput(call_id=EEP_NOTIFICATION_CALL_ID, result=result)
        outputs = EngineCoreOutputs(utility_output=told)
        outputs.engine_index = self.engine_index
        self._tell(0, outputs)

    def _let_go_of_group(self) -> None:
        """Peers that wait for this rank see that it has gone."""
        group, last = self.dp_group, self._last
        self.dp_group = Numbers(group.rank(), group.size())
        if last is not None:
            last.old_dp_group = last.new_dp_group = None
        close_gloo(group)

    def _tell(self, client: int, outputs: Any) -> None:
        self.output_queue.put_nowait((client, outputs))

    def _throw_step_away(self) -> None:
        """Requests are where they were before it, and are computed anew from their tokens: blocks
        count as cached from when they are given out, whatever is written to them then."""
        for future, *_ in reversed(self.batch_queue or ()):
            with suppress(Exception):  # of the same fault
                future.result()
        if self.batch_queue:
            self.batch_queue.clear()
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        for request in self.scheduler.requests.values():
            # No output of theirs will come any more.
            request.num_in_flight_tokens = request.num_stale_output_tokens = 0

    def end_elastic_ep(self, reason: str) -> None:
        """This engine ends, as its group does. A utility call."""
        self._end_reason = reason

    def fail_elastic_step(self, reason: str) -> None:
        """A peer's step has failed: this rank, which may have none just now, rests as well. A
        utility call."""
        if self.dp_group is not None and not self.rests:
            self._failed_elsewhere = reason

    def has_work(self) -> bool:
        told = self._end_reason or self._failed_elsewhere
        return bool(told) or bool(super().has_work())  # type: ignore[misc]

    def _process_input_queue(self) -> None:
        super()._process_input_queue()  # type: ignore[misc]
        if self._end_reason:
            raise EngineError(self._end_reason)
        reason, self._failed_elsewhere = self._failed_elsewhere, ""
        if reason:
            raise RuntimeError(reason)
