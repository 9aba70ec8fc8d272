"""NIXL EP's buffer under vLLM: peers are waited for with a deadline, and can be let go of."""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.device_communicators.all2all import NixlEPAll2AllManager

from dynamo_elastic.engine.vllm.elastic.meeting import Meeting
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings


class ElasticNixlManager(NixlEPAll2AllManager):  # type: ignore[misc]
    """Connects to peers only once they have said how; NIXL EP itself would wait 300 s for a peer
    that never does, in a call that can't be ended."""

    over: threading.Event | None = None
    """Of the operation that connects."""

    def _connect_to_ep_size(self, ep_size: int, *, make_active: bool) -> None:
        connected = NixlEPAll2AllManager._buffer.connected_ep_size
        if ep_size > connected:
            self._await(range(connected, ep_size))
        super()._connect_to_ep_size(ep_size, make_active=make_active)

    def _await(self, peers: range) -> None:
        settings = ElasticSettings.from_environment()
        store: Any = self.tcp_store_group.store
        meeting = Meeting(
            store,
            timeout_s=settings.prepare_timeout_s,
            poll_s=settings.poll_s,
            over=self.over,
            told_in=store.underlying_store,
        )
        meeting.wait([f"NIXL_EP/{rank}" for rank in peers])

    def let_go(self) -> None:
        """Peers that are connected and not in use are disconnected: those of an operation that was
        given up."""
        with NixlEPAll2AllManager._lock:
            state = NixlEPAll2AllManager._buffer
            if state is not None and state.connected_ep_size > state.active_ep_size:
                self._disconnect_to_ep_size(state.active_ep_size)
