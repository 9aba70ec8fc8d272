"""What a rank that has left lets go of, so that it can be parked, and how it gets that back."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dynamo_elastic.engine.vllm.elastic.laps import Laps
from dynamo_elastic.engine.vllm.v0_33 import buffer
from dynamo_elastic.engine.vllm.v0_33.expert_moves import StagedMoves
from dynamo_elastic.errors import EngineError, RebindFailed, RebindRefused

_log = logging.getLogger(__name__)


class Leaver:
    """Of one worker, however often it leaves and comes back."""

    def __init__(self, worker: Any, *, rebinds: bool) -> None:
        self._worker = worker
        self._rebinds = rebinds
        self._graphs: Any = None
        """Read once: what was captured is not what graphs launch once they are rebound."""
        self._memory: Any = None

    def graphs(self) -> Any:
        """Those of the worker. Raises RebindRefused, or EngineError without a buffer."""
        return self._graphs if self._graphs is not None else self._worker.rebinding()

    def let_go(self, sent: Iterable[Tensor]) -> dict[str, Any]:
        """Nothing that peers know of is left, nor, with vLLM's cumem allocator, any weights and KV
        cache; `sent` comes again from a rank that serves. Says what is left. Every peer must have
        disconnected."""
        laps = Laps()
        state = self._worker.model_runner.eplb_state
        for model_state in state.model_states.values():
            moves, model_state.communicator = model_state.communicator, None
            if isinstance(moves, StagedMoves):
                moves.close()
        gc.collect()
        laps.mark("expert moves")
        found = self._read_graphs()
        laps.mark("graphs")
        buffer.destroy()
        laps.mark("buffer")
        if self._worker.model_config.enable_cumem_allocator:
            from dynamo_elastic.engine.vllm.v0_33.memory import PoolMemory

            self._memory = PoolMemory()
            found["unmapped_bytes"] = self._memory.unmap(sent)
            found["kept_bytes"] = self._memory.kept_bytes
            laps.mark("memory")
        torch.accelerator.empty_cache()
        return found | {
            "used_bytes": used_bytes(),
            "seconds": laps.s,
        }

    def _read_graphs(self) -> dict[str, Any]:
        if not self._rebinds:
            return {}
        try:
            self._graphs = self.graphs()
        except (RebindRefused, EngineError) as exc:
            _log.warning("graphs of this rank will be captured again: %s", exc)
            return {"refused": str(exc)}
        facts: dict[str, Any] = self._graphs.facts
        return facts

    def map_memory(self) -> None:
        """Weights and KV cache have their addresses again. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.map()

    def rebind(self) -> bool:
        """Whether the graphs go on with the buffer that the layers have now; if not, they have to
        be captured again."""
        if self._graphs is None:
            return False
        try:
            _log.warning("graphs: %s", self._graphs.rebind())
        except (RebindRefused, RebindFailed) as exc:
            self._graphs = None
            _log.warning("graphs are captured again: %s", exc)
            return False
        return True


def used_bytes() -> int:
    """Of this GPU, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
