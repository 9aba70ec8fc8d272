"""Dynamo's scheduler in vLLM's engine core, with sockets that open and close at our word.

Loaded by name (--scheduler-cls) in the engine core's process; its two calls are reached as utility
calls of the engine core, the way Dynamo's own set_fpm_worker_id is.
"""

from __future__ import annotations

import logging
import os
import random
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.vllm.calls import CORE_ATTACH, CORE_RELEASE
from dynamo_elastic.engine.vllm.release import release_process, wait_no_tcp
from dynamo_elastic.engine.vllm.shims import apply_shims

apply_shims()

from dynamo.vllm import instrumented_scheduler as dynamo_scheduler  # noqa: E402
from vllm.distributed.kv_events import EventPublisherFactory, KVEventsConfig  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402

SCHEDULER = f"{__name__}.ElasticInstrumentedScheduler"

PORTS = range(20400, 32700)
"""Where publishers listen: Dynamo wants registered ports, and the kernel gives out those above."""

_CLOSE_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class ElasticInstrumentedScheduler(dynamo_scheduler.InstrumentedScheduler):  # type: ignore[misc]
    """Publishes forward-pass metrics and KV events on ports of its own, from attach() on.

    Ports in an image would be those of every copy, and each would hear the others.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # The port is open only until release(): any that is free. Dynamo adds the rank to it.
        rank = self._resolve_dp_rank(vllm_config.parallel_config)
        os.environ[dynamo_scheduler.ENV_FPM_PORT] = str(-rank)
        self._events: KVEventsConfig | None = vllm_config.kv_events_config
        super().__init__(vllm_config, *args, **kwargs)
        self._opened = True

    def release(self) -> None:
        """No publisher, and no port, is open. Idempotent."""
        opened, self._opened = self._opened, False
        if opened:
            self._publisher.shutdown()
            self.kv_event_publisher.shutdown()

    def attach(self) -> dict[str, Any]:
        """Publishers are open on loopback ports that nobody else has: {'fpm_port': N, 'events':
        address, '' if KV events are off}. The worker id comes later, with set_fpm_worker_id."""
        self.release()
        self._opened = True
        self._publisher, fpm_port = self._open_publisher()
        self.kv_event_publisher = EventPublisherFactory.create(self._events, self._fpm_dp_rank)
        opened = self.kv_event_publisher.get_publisher_config()
        return {"fpm_port": fpm_port, "events": opened.endpoint if opened is not None else ""}

    def _open_publisher(self) -> tuple[Any, int]:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            with suppress(zmq.ZMQError):
                publisher = dynamo_scheduler._FpmPublisherThread(
                    f"tcp://127.0.0.1:{port}",
                    worker_id=self._fpm_worker_id,
                    dp_rank=self._fpm_dp_rank,
                )
                return publisher, port
        raise OSError(f"no port of {PORTS.start}-{PORTS.stop - 1} is free")


def _release(core: Any) -> None:
    """The engine core holds nothing that an image must not hold. Raises EngineError."""
    core.scheduler.release()
    wait_no_tcp(_CLOSE_TIMEOUT_S)
    release_process()


def _attach(core: Any, attach: dict[str, Any]) -> dict[str, Any]:
    """The engine core has the identity of `attach`; returns where it publishes."""
    renew(msgspec.convert(attach, Attach))
    opened: dict[str, Any] = core.scheduler.attach()
    _log.info("publishes on %s", opened)
    return opened


setattr(EngineCore, CORE_RELEASE, _release)
setattr(EngineCore, CORE_ATTACH, _attach)
