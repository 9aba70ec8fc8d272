"""Stands in for `vllm serve` where the benchmark itself is tested: the routes that it calls."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

from aiohttp import web

_TOKEN_S = 0.002


class Rank:
    """Pauses all streams while it scales; a leaver refuses from then on."""

    def __init__(self, arguments: argparse.Namespace, *, retired: bool) -> None:
        self._rank = arguments.data_parallel_rank
        self._serves = asyncio.Event()
        self._retired = retired
        joins = os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH") == "1"
        self._group = Path(arguments.model_tag).parent / "scaled"
        if not joins:
            self._serves.set()

    async def health(self, _: web.Request) -> web.Response:
        if self._group.exists() and int(self._group.read_text()) > self._rank:
            self._serves.set()
        return web.Response(status=200 if self._serves.is_set() else 503)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._retired:
            return web.json_response({"error": "retired"}, status=503)
        if not body.get("stream"):
            token_logprobs = [-1.5] * body["max_tokens"]
            return web.json_response(
                {"choices": [{"logprobs": {"token_logprobs": token_logprobs}}]}
            )
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await self._serves.wait()
            await asyncio.sleep(_TOKEN_S)
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    async def scale(self, request: web.Request) -> web.Response:
        size = (await request.json())["new_data_parallel_size"]
        if size > 3:
            return web.json_response({"error": "no room"}, status=500)
        self._serves.clear()
        await asyncio.sleep(0.2)
        self._group.write_text(str(size))
        self._retired = self._rank >= size
        self._serves.set()
        return web.json_response({})

    async def facts(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": [{"ep_size": 0 if self._retired else 2}]})

    async def attach(self, _: web.Request) -> web.Response:
        if not self._retired:
            return web.json_response({"error": "in a group"}, status=409)
        self._retired = False
        return web.json_response({"handshake": 0.01})

    async def call(self, request: web.Request) -> web.Response:
        return web.json_response({"results": [{"called": (await request.json())["method"]}]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model_tag")
    parser.add_argument("--port", type=int)
    parser.add_argument("--data-parallel-rank", type=int)
    arguments, _ = parser.parse_known_args()
    json.loads((Path(arguments.model_tag) / "config.json").read_text())
    listener = socket.create_server(("127.0.0.1", arguments.port))
    asyncio.run(serve(arguments, retired=False, listener=listener))


async def serve(arguments: Any, *, retired: bool, listener: socket.socket) -> None:
    """Answer until the process ends."""
    application = web.Application()
    rank = Rank(arguments, retired=retired)
    application.add_routes(
        [
            web.get("/health", rank.health),
            web.post("/v1/completions", rank.complete),
            web.post("/scale_elastic_ep", rank.scale),
            web.post("/collective_rpc", rank.call),
            web.post("/elastic_ep/facts", rank.facts),
            web.post("/elastic_ep/attach", rank.attach),
        ]
    )
    runner = web.AppRunner(application)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
