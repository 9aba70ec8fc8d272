"""An external scaler for KEDA: tells it how many worker pods a deployment wants.

    python examples/keda/external_scaler.py --api http://127.0.0.1:9087 --listen 127.0.0.1:9090

A gRPC server of KEDA's service `externalscaler.ExternalScaler`, and a client of the coordinator's
HTTP API. Its one metric, `slots_wanted`, rises with the target and falls only when the operation
that frees a slot is over. If the API does not answer, KEDA is told so and falls back to what its
ScaledObject says.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

METRIC = "slots_wanted"
_SERVICE = "externalscaler.ExternalScaler"
_TIMEOUT_S = 3.0
_POLL_S = 1.0
_F = descriptor_pb2.FieldDescriptorProto
_MESSAGES: Mapping[str, tuple[tuple[str, int, Any], ...]] = {
    "ScaledObjectRef": (("name", 1, _F.TYPE_STRING), ("namespace", 2, _F.TYPE_STRING)),
    "IsActiveResponse": (("result", 1, _F.TYPE_BOOL),),
    "MetricSpec": (
        ("metricName", 1, _F.TYPE_STRING),
        ("targetSize", 2, _F.TYPE_INT64),
        ("targetSizeFloat", 3, _F.TYPE_DOUBLE),
    ),
    "GetMetricSpecResponse": (("metricSpecs", 1, "MetricSpec"),),
    "GetMetricsRequest": (("metricName", 2, _F.TYPE_STRING),),
    "MetricValue": (
        ("metricName", 1, _F.TYPE_STRING),
        ("metricValue", 2, _F.TYPE_INT64),
        ("metricValueFloat", 3, _F.TYPE_DOUBLE),
    ),
    "GetMetricsResponse": (("metricValues", 1, "MetricValue"),),
}
"""What of KEDA's messages is used: name, number and type of each field (a message: repeated)."""


def _message_types() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="externalscaler.proto", package="externalscaler", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            added = message.field.add(name=field, number=number, label=_F.LABEL_OPTIONAL)
            if isinstance(kind, str):
                added.type, added.type_name = _F.TYPE_MESSAGE, f".externalscaler.{kind}"
                added.label = _F.LABEL_REPEATED
            else:
                added.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {
        name: message_factory.GetMessageClass(find(f"externalscaler.{name}")) for name in _MESSAGES
    }


TYPES = _message_types()


class Scaler:
    """Answers KEDA from the coordinator's API at `url`. Any coordinator will do."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def _wanted(self, context: grpc.aio.ServicerContext) -> int:
        try:
            async with self._session.get(f"{self._url}/v1/status") as response:
                response.raise_for_status()
                return int((await response.json())[METRIC])
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as exc:
            why = f"{self._url}: {str(exc) or type(exc).__name__}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
            raise

    async def is_active(self, _: Any, context: grpc.aio.ServicerContext) -> Any:
        return TYPES["IsActiveResponse"](result=await self._wanted(context) > 0)

    async def stream_is_active(
        self, _: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        """Now, and whenever it changes."""
        last = None
        while True:
            active = await self._wanted(context) > 0
            if active != last:
                yield TYPES["IsActiveResponse"](result=active)
            last = active
            await asyncio.sleep(_POLL_S)

    async def metric_spec(self, _: Any, context: grpc.aio.ServicerContext) -> Any:
        """One pod for each slot."""
        spec = TYPES["MetricSpec"](metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return TYPES["GetMetricSpecResponse"](metricSpecs=[spec])

    async def metrics(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.metricName not in ("", METRIC):
            why = f"there is no metric {request.metricName!r}, only {METRIC}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        wanted = await self._wanted(context)
        value = TYPES["MetricValue"](
            metricName=METRIC, metricValue=wanted, metricValueFloat=float(wanted)
        )
        return TYPES["GetMetricsResponse"](metricValues=[value])


def _handlers(scaler: Scaler) -> grpc.GenericRpcHandler:
    def unary(method: Any, request: str) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            method,
            request_deserializer=TYPES[request].FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    return grpc.method_handlers_generic_handler(
        _SERVICE,
        {
            "IsActive": unary(scaler.is_active, "ScaledObjectRef"),
            "GetMetricSpec": unary(scaler.metric_spec, "ScaledObjectRef"),
            "GetMetrics": unary(scaler.metrics, "GetMetricsRequest"),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                scaler.stream_is_active,
                request_deserializer=TYPES["ScaledObjectRef"].FromString,
                response_serializer=lambda message: message.SerializeToString(),
            ),
        },
    )


async def serve(url: str, listen: str, token: str, stop: asyncio.Event) -> None:
    """Serve KEDA on `listen` until `stop` is set. Raises RuntimeError if the port is taken."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_handlers(Scaler(session, url.rstrip("/"))),))
        server.add_insecure_port(listen)
        await server.start()
        await stop.wait()
        await server.stop(grace=1.0)


async def _main(arguments: argparse.Namespace) -> None:
    token = arguments.token_file.read_text().strip() if arguments.token_file else ""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(arguments.api, arguments.listen, token, stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An external scaler for KEDA.")
    parser.add_argument("--api", required=True, help="URL of a coordinator's HTTP API")
    parser.add_argument("--listen", default="127.0.0.1:9090", help="HOST:PORT for KEDA")
    parser.add_argument(
        "--token-file", type=Path, help="the API's token (coordinator.api.token_file)"
    )
    asyncio.run(_main(parser.parse_args()))
