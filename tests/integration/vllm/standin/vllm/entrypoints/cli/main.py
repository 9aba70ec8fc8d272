"""Stands in for `vllm serve` where the benchmark itself is tested: the routes that it calls. Next
tokens are a function of the last one."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

from aiohttp import web
from vllm.entrypoints.cli.operation import (
    COMMITTING,
    COMPLETED,
    FAILED,
    PREPARING,
    Operations,
)

_TOKEN_S = 0.002
_PAUSE_S = 0.2
_PART_S = {"handshake": 0.05, "worker": 0.05, "weights": 0.4}
_LIKELY, _UNLIKELY = -1.5, -9.0


def after(token: int) -> int:
    return 5 + (token * 31 + 7) % 400


class Rank:
    """Pauses all streams while it scales; a leaver refuses from then on."""

    def __init__(self, arguments: argparse.Namespace, *, retired: bool) -> None:
        self._rank, self._most = arguments.data_parallel_rank, arguments.elastic_ep_max_dp_size
        self._ours = arguments.worker_cls is not None
        self._serves = asyncio.Event()
        self._retired = retired
        self._joining: asyncio.Task[None] | None = None
        group = Path(arguments.model_tag).parent / "group"
        joins = os.environ.get("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH") == "1"
        founds = self._rank == 0 and not (joins or retired)
        self._operations = Operations(group, arguments.data_parallel_size, anew=founds)
        self._epoch = self._operations.now()["epoch"]
        if joins and not retired:
            self._joining = asyncio.create_task(self._boot_and_join())
        else:
            self._serves.set()

    async def _boot_and_join(self) -> None:
        now = await self._operations.until(0, PREPARING)
        await asyncio.sleep(0.3)
        self._operations.say_ready(now["epoch"], self._rank)
        await self._until_it_serves(now["epoch"])

    async def _until_it_serves(self, epoch: int) -> None:
        now = await self._operations.until(epoch, COMPLETED, FAILED)
        self._retired = now["phase"] == FAILED
        self._epoch = epoch
        self._serves.set()

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._serves.is_set() else 503)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._retired:
            return web.json_response({"error": "retired"}, status=503)
        if not body.get("stream"):
            return web.json_response({"choices": [self._choice(body)]})
        response = web.StreamResponse()
        await response.prepare(request)
        token = body["prompt"][-1]
        for _ in range(body["max_tokens"]):
            await self._serves.wait()
            await asyncio.sleep(_TOKEN_S)
            token = after(token)
            chunk = {"choices": [{"text": "x", "token_ids": [token]}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "logprobs": {"token_logprobs": [_LIKELY] * body["max_tokens"]},
        }
        if "prompt_logprobs" in body:
            rows: list[Any] = [None]
            for last, token in zip(body["prompt"], body["prompt"][1:], strict=False):
                rows.append({str(token): {"logprob": _UNLIKELY}})
                rows[-1][str(after(last))] = {"logprob": _LIKELY}
            choice["prompt_logprobs"] = rows
        return choice

    async def scale(self, request: web.Request) -> web.Response:
        size = (await request.json())["new_data_parallel_size"]
        if size > self._most:
            return web.json_response({"error": "no room"}, status=400)
        operations = self._operations
        if self._rank == 0:
            if operations.now()["phase"] in (PREPARING, COMMITTING):
                return web.json_response({"error": "already active"}, status=500)
            now = operations.begin(size)
        else:
            now = await operations.until(self._epoch + 1, PREPARING, COMMITTING, COMPLETED, FAILED)
        self._epoch = now["epoch"]
        if not await self._all_are_ready(range(operations.width, size)):
            return web.json_response({"error": "undone"}, status=500)
        self._serves.clear()
        await asyncio.sleep(_PAUSE_S)
        if self._rank == 0:
            operations.put_width(size)
            operations.go_to(COMPLETED)
        await operations.until(self._epoch, COMPLETED)
        self._retired = self._rank >= size
        self._serves.set()
        return web.json_response({})

    async def _all_are_ready(self, joiners: range) -> bool:
        operations = self._operations
        if self._rank != 0:
            now = await operations.until(self._epoch, COMMITTING, COMPLETED, FAILED)
            return bool(now["phase"] != FAILED)
        while not operations.are_ready(self._epoch, joiners):
            if operations.now()["error"]:
                operations.go_to(FAILED)
                return False
            await asyncio.sleep(0.005)
        operations.go_to(COMMITTING)
        return True

    async def status(self, _: web.Request) -> web.Response:
        now = self._operations.now()
        said = {"phase": now["phase"], "requested_data_parallel_size": now.get("to")}
        return web.json_response(said)

    async def fail(self, _: web.Request) -> web.Response:
        if self._operations.now()["phase"] == PREPARING:
            self._operations.say_error()
        return web.json_response({})

    async def facts(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": [{"ep_size": 0 if self._retired else 2}]})

    async def attach(self, _: web.Request) -> web.Response:
        if not self._retired:
            return web.json_response({"error": "in a group"}, status=409)
        now = await self._operations.until(0, PREPARING)
        await asyncio.sleep(sum(_PART_S.values()))
        self._serves.clear()
        self._retired = False
        self._operations.say_ready(now["epoch"], self._rank)
        self._joining = asyncio.create_task(self._until_it_serves(now["epoch"]))
        return web.json_response(_PART_S)

    async def call(self, request: web.Request) -> web.Response:
        return web.json_response({"results": [{"called": (await request.json())["method"]}]})

    def routes(self) -> list[web.RouteDef]:
        found = [
            web.get("/health", self.health),
            web.post("/v1/completions", self.complete),
            web.post("/scale_elastic_ep", self.scale),
            web.post("/is_scaling_elastic_ep", self.status),
            web.post("/collective_rpc", self.call),
        ]
        if self._ours:
            found += [
                web.post("/elastic_ep/facts", self.facts),
                web.post("/elastic_ep/attach", self.attach),
                web.post("/elastic_ep/fail", self.fail),
            ]
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model_tag")
    parser.add_argument("--port", type=int)
    parser.add_argument("--data-parallel-rank", type=int)
    parser.add_argument("--data-parallel-size", type=int)
    parser.add_argument("--elastic-ep-max-dp-size", type=int)
    parser.add_argument("--worker-cls")
    arguments, _ = parser.parse_known_args()
    json.loads((Path(arguments.model_tag) / "config.json").read_text())
    listener = socket.create_server(("127.0.0.1", arguments.port))
    asyncio.run(serve(arguments, retired=False, listener=listener))


async def serve(arguments: Any, *, retired: bool, listener: socket.socket) -> None:
    """Answer until the process ends."""
    application = web.Application()
    application.add_routes(Rank(arguments, retired=retired).routes())
    runner = web.AppRunner(application)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
