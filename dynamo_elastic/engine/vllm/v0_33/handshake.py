"""Rank 0's handshake with ranks that join. vLLM's own ends when a rank that nobody expects says
hello, and answers for up to a second after it was stopped, with a store that is gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq
from vllm import envs
from vllm.distributed.elastic_ep import external_elastic_ep as external
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine import ReconfigureDistributedRequest, ReconfigureRankType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import EngineHandshakeMetadata
from vllm.v1.utils import get_engine_client_zmq_addr

from dynamo_elastic.engine.vllm.elastic.place import PARALLEL_FIELDS

_log = logging.getLogger(__name__)
_POLL_MS = 20
_Upstream = external.ExternalElasticEPScaleUpHandshakeServer


class ElasticHandshakeServer(_Upstream):  # type: ignore[misc, valid-type]
    """Tells every expected rank where the group is, until all are ready or it is stopped."""

    def _run(self) -> None:
        try:
            with (
                zmq.Context() as context,
                make_zmq_socket(
                    context, self.handshake_address, zmq.ROUTER,
                    bind=True, linger=0, router_handover=True,
                ) as socket,
            ):  # fmt: skip
                self.started_event.set()
                self._answer(socket, set(self.expected_new_ranks))
        except zmq.ZMQError as exc:
            self._error = exc
            self.started_event.set()

    def _answer(self, socket: Any, waited_for: set[int]) -> None:
        while waited_for and not self._stop_event.is_set():
            if not socket.poll(_POLL_MS):
                continue
            identity, payload = socket.recv_multipart()
            rank = int.from_bytes(identity, "little")
            status = msgspec.msgpack.decode(payload).get("status")
            if self._stop_event.is_set():
                return
            if rank not in self.expected_new_ranks:
                _log.warning("rank %d says %s, and nobody waits for it", rank, status)
            elif status == "HELLO":
                socket.send_multipart((identity, msgspec.msgpack.encode(self._welcome())))
            elif status == "READY":
                waited_for.discard(rank)

    def _welcome(self) -> Any:
        new = self.bootstrap
        parallel = {
            "data_parallel_master_ip": new.new_data_parallel_master_ip,
            "data_parallel_master_port": new.new_data_parallel_master_port,
            "_data_parallel_master_port_list": new.new_data_parallel_master_port_list,
            "data_parallel_size": new.new_data_parallel_size,
            "_coord_store_port": new.coord_store_port,
        }
        return external.ExternalElasticEPScaleUpHandshakeMetadata(
            engine_metadata=EngineHandshakeMetadata(
                addresses=self.addresses, parallel_config=parallel
            ),
            num_redundant_experts=self.num_redundant_experts,
            elastic_ep_max_dp_size=self.elastic_ep_max_dp_size,
        )


TOLD = (
    "data_parallel_master_ip",
    "data_parallel_master_port",
    "_data_parallel_master_port_list",
    "data_parallel_size",
    "_coord_store_port",
    *PARALLEL_FIELDS,
)
"""What a rank that joins knows of its group, from rank 0 and from its place, as fields of its
ParallelConfig."""


ADDRESSES = ("coordinator_input", "coordinator_output", "frontend_stats_publish_address")
"""Where the DP coordinator is, as fields of vLLM's EngineZmqAddresses."""


@contextmanager
def greeted(parallel: Any, rank: int) -> Iterator[Any]:
    """`parallel` knows the group that `rank` joins; gives vLLM's EngineZmqAddresses of rank 0, who
    hears that this one is ready if this ends well. Waits for rank 0 as vLLM's joiners do."""
    # That it joins is what tells vLLM how to read the answer.
    os.environ["VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"] = "1"
    envs.disable_envs_cache()
    address = get_engine_client_zmq_addr(
        False, parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port
    )
    identity = rank.to_bytes(2, "little")
    with (
        zmq.Context() as context,
        make_zmq_socket(
            context, address, zmq.DEALER, identity=identity, linger=5000, bind=False
        ) as socket,
    ):
        yield EngineCoreProc.startup_handshake(socket, True, False, parallel)
        socket.send(msgspec.msgpack.encode({"status": "READY"}))


def request_of(told: dict[str, Any]) -> ReconfigureDistributedRequest:
    """What rank 0 told a joiner, in the words that it has for the others."""
    return ReconfigureDistributedRequest(
        new_data_parallel_size=told["data_parallel_size"],
        new_data_parallel_rank=ReconfigureRankType.KEEP_CURRENT_RANK,
        new_data_parallel_rank_local=ReconfigureRankType.KEEP_CURRENT_RANK,
        new_data_parallel_master_ip=told["data_parallel_master_ip"],
        new_data_parallel_master_port=told["data_parallel_master_port"],
        new_data_parallel_master_port_list=told["_data_parallel_master_port_list"],
        coord_store_port=told["_coord_store_port"],
    )


def install() -> None:
    """vLLM starts ElasticHandshakeServers from now on."""
    external.ExternalElasticEPScaleUpHandshakeServer = ElasticHandshakeServer
