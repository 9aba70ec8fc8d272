"""vLLM's moves of experts go through our exchange where it would have NIXL read each in place."""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import all_gather_object
from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.distributed.eplb.eplb_utils import device_stream

from dynamo_elastic.engine.vllm.elastic.experts import (
    REGION_BYTES,
    Expert,
    ExpertExchange,
    Wanted,
    row_bytes,
)
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.v0_33.weights import new_agent

_log = logging.getLogger(__name__)

BACKEND = "nixl"
"""Of vLLM's `--eplb-config.communicator`."""


class GlooRanks:
    """experts.Everyone of a gloo group, whose timeout its calls have."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        return int(self._group.rank())

    def gather(self, said: Any) -> list[Any]:
        heard: list[Any] = [None] * self._group.size()
        all_gather_object(heard, said, group=self._group)
        return heard


class StagedMoves(EplbCommunicator):  # type: ignore[misc]
    """vLLM's EplbCommunicator over an ExpertExchange, which goes with it, if a little later."""

    def __init__(self, group: Any, layers: Sequence[Expert]) -> None:
        """`layers`: the weights of all experts of this rank, (experts, ...) each; all ranks of
        `group` make one at the same time."""
        self.set_stream(None)
        self._held: dict[int, Expert] = {}
        self._wanted: list[Wanted] = []
        ranks = GlooRanks(group)
        largest = max(row_bytes([weights[0] for weights in layer]) for layer in layers)
        exchange = ExpertExchange(
            ranks,
            new_agent(f"experts-{ranks.rank}-{uuid.uuid4().hex[:8]}"),
            layers[0][0].device,
            timeout_s=ElasticSettings.from_environment().group_timeout_s,
            region_bytes=max(REGION_BYTES, largest),
        )
        self._exchange = exchange
        self._dropped = weakref.finalize(self, _close_aside, exchange)
        self._dropped.atexit = False
        self._log_initialized()

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing that peers know of is left. Idempotent."""
        self._dropped.detach()
        self._exchange.close()

    def add_send(self, tensors: list[Tensor], dst_rank: int, expert_id: int) -> None:
        """Of vLLM: who wants it says so itself."""
        self._held[expert_id] = tensors

    def add_recv(self, tensors: list[Tensor], src_rank: int, expert_id: int) -> None:
        self._wanted.append(Wanted(src_rank, expert_id, tensors))

    def execute(self) -> None:
        """See ExpertExchange.move()."""
        held, self._held = self._held, {}
        wanted, self._wanted = self._wanted, []
        began_s = time.monotonic()
        with device_stream(self._stream):
            self._exchange.move(held, wanted)
        size_bytes = sum(row_bytes(one.into) for one in wanted)
        _log.info(
            "%d experts came, %d bytes in %.3f s",
            *(len(wanted), size_bytes, time.monotonic() - began_s),
        )


def _close_aside(exchange: ExpertExchange) -> None:
    """vLLM drops one for the next in the middle of a commit, and closes none."""
    threading.Thread(target=exchange.close, name="close-expert-moves", daemon=True).start()


def install() -> None:
    """vLLM makes StagedMoves where its own would use NIXL, from now on."""
    create = eplb_state.create_eplb_communicator

    def created(
        group_coordinator: Any,
        backend: str,
        expert_weights: Sequence[Expert],
        expert_buffer: Sequence[Tensor],
    ) -> Any:
        if backend == BACKEND:
            return StagedMoves(group_coordinator.cpu_group, expert_weights)
        return create(group_coordinator, backend, expert_weights, expert_buffer)

    eplb_state.create_eplb_communicator = created
