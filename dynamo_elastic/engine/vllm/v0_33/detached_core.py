"""An engine core that boots without a group, and what it lacks until it is attached: the way to the
DP coordinator, which wakes engines that rest."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynamo_elastic.engine.vllm.calls import CORE_ATTACH, CORE_RELEASE
from dynamo_elastic.engine.vllm.elastic.outputs import divert
from dynamo_elastic.engine.vllm.release import release_process
from dynamo_elastic.engine.vllm.v0_33.core import ElasticEngineCore
from dynamo_elastic.engine.vllm.v0_33.operation import EXECUTE
from dynamo_elastic.errors import ConfigError


class DetachedEngineCore(ElasticEngineCore):
    """Boots with its own front end alone, and joins by attach_elastic_ep() like a rank that has
    left. vLLM's launch flag of a joiner must be set: without it vLLM would measure memory."""

    has_coordinator: bool
    """vLLM's own: whether the DP coordinator hears of this engine."""

    @contextmanager
    def _perform_handshakes(
        self,
        handshake_address: str,
        identity: bytes,
        local_client: bool,
        vllm_config: Any,
        client_handshake_address: str | None,
    ) -> Iterator[Any]:
        """With the front end beside it; rank 0 is asked when there is a group to join."""
        own = client_handshake_address or handshake_address
        with (
            zmq.Context() as context,
            self._perform_handshake(context, own, identity, True, False, vllm_config) as found,
        ):
            yield found
        vllm_config.__post_init__()

    def _init_data_parallel(self, vllm_config: Any) -> None:
        if vllm_config.parallel_config._coord_store_port:
            super()._init_data_parallel(vllm_config)
            return
        parallel = vllm_config.parallel_config
        self.dp_rank, self.dp_size = parallel.data_parallel_rank, parallel.data_parallel_size
        self.dp_group = self.dp_store = None

    def _eep_scale_up_before_kv_init(self) -> None:
        if self.dp_group is not None:
            super()._eep_scale_up_before_kv_init()
            return
        given = self.vllm_config.cache_config.kv_cache_memory_bytes
        if not given:
            raise ConfigError(
                ["--kv-cache-memory-bytes: a rank that boots without a group has nobody to tell it"]
            )
        self.available_gpu_memory_for_kv_cache = given

    def capture_elastic_ep(self) -> None:
        """Kernels are warm, and all graphs captured. A utility call, once."""
        self.model_executor.collective_rpc(EXECUTE, args=("capture",))

    def detach_elastic_ep(self) -> dict[str, Any]:
        """Nothing that a peer would know of, no weights and no KV cache are left. Says what is
        left. A utility call, before the rank is parked or an image is made."""
        self._forget_keys()
        (said,) = self.model_executor.collective_rpc(EXECUTE, args=("detach",))
        facts: dict[str, Any] = said
        return facts

    def elastic_release(self) -> None:
        """This process holds nothing that an image must not hold. A utility call."""
        upstream = getattr(super(), CORE_RELEASE, None)  # of Dynamo's scheduler, where that is
        if upstream is not None:
            upstream()
        release_process()

    def elastic_attach(self, attach: dict[str, Any]) -> dict[str, Any]:
        """This process has the identity of `attach`; says where Dynamo's scheduler publishes, {}
        without it. A utility call."""
        upstream = getattr(super(), CORE_ATTACH, None)
        opened: dict[str, Any] = upstream(attach) if upstream is not None else {}
        self.renew_elastic_ep(attach)
        return opened

    def follow_coordinator(self, addresses: Any) -> None:
        """What it says comes to our loop, and ours to it. Once: it outlives every group."""
        if self.has_coordinator:
            return
        outgoing: queue.Queue[Any] = queue.Queue()
        # vLLM's threads take no new socket, and hold on to the queue that they have.
        self.output_queue.put_nowait = divert(self.output_queue.put_nowait, outgoing.put_nowait)
        for target, address in (
            (self._hear_coordinator, addresses.coordinator_input),
            (self._tell_coordinator, addresses.coordinator_output),
        ):
            threading.Thread(target=target, args=(address, outgoing), daemon=True).start()
        self.has_coordinator = True

    def _hear_coordinator(self, address: str, _: queue.Queue[Any]) -> None:
        identity = self.engine_index.to_bytes(2, "little")
        decoder = MsgpackDecoder()
        with (
            zmq.Context() as context,
            make_zmq_socket(context, address, zmq.XSUB, identity=identity, bind=False) as socket,
        ):
            socket.send(b"\x01")
            while True:
                kind, *data = socket.recv_multipart(copy=False)
                if kind.buffer != b"READY":
                    item = EngineCoreRequestType(bytes(kind.buffer)), decoder.decode(data)
                    self.input_queue.put_nowait(item)

    def _tell_coordinator(self, address: str, outgoing: queue.Queue[Any]) -> None:
        encoder = MsgpackEncoder()
        with (
            zmq.Context() as context,
            make_zmq_socket(context, address, zmq.PUSH, bind=False, linger=4000) as socket,
        ):
            while True:
                outputs = outgoing.get()
                outputs.engine_index = self.engine_index
                socket.send_multipart(encoder.encode(outputs))
