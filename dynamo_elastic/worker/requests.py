"""Requests of Dynamo's frontend, run on this shell's engine."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

from dynamo_elastic.dynamo.base import Context
from dynamo_elastic.engine.base import Engine, Finish, Output, Request
from dynamo_elastic.errors import EngineError, EngineGone, RequestMoved, RequestRefused
from dynamo_elastic.worker.traffic import GONE, MOVED, TokenMeter

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "guided_decoding": (None,),
}
"""Sampling options that the engine does not have, with the values that ask for nothing."""

_SEED_BITS = 63
_IDLE_POLL_S = 0.02


def engine_request(
    request: Mapping[str, Any], context_id: str, request_id: str, max_context: int
) -> Request:
    """The engine's form of a frontend's request. Raises RequestRefused naming field and remedy.

    Without a seed one is made from the frontend's id of the request, which a moved request keeps:
    it goes on with the tokens that it would have had.
    """
    prompt = tuple(int(t) for t in request.get("token_ids") or ())
    sampling, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    if not prompt:
        raise RequestRefused("prompt: it has no tokens; send at least one")
    room = max_context - len(prompt)
    if room < 1:
        raise RequestRefused(
            f"prompt: {len(prompt)} tokens leave no room in a context of {max_context}; shorten it"
        )
    for name, neutral in _NEUTRAL.items():
        if sampling.get(name) not in neutral:
            raise RequestRefused(f"{name}: not supported, got {sampling[name]!r}; leave it out")
    if (request.get("output_options") or {}).get("logprobs") is not None:
        raise RequestRefused("logprobs: not supported; leave it out")
    seed, temperature = sampling.get("seed"), sampling.get("temperature")
    return Request(
        request_id=request_id,
        prompt=prompt,
        max_tokens=min(room, int(stop.get("max_tokens") or room)),
        seed=_seed_of(context_id) if seed is None else int(seed),
        temperature=1.0 if temperature is None else float(temperature),
        stop_tokens=_stop_tokens(request, stop),
    )


def _seed_of(context_id: str) -> int:
    digest = hashlib.sha256(context_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def _stop_tokens(request: Mapping[str, Any], stop: Mapping[str, Any]) -> tuple[int, ...]:
    asked = [*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_visible") or ())]
    if not stop.get("ignore_eos"):
        asked += [*(stop.get("stop_token_ids_hidden") or ()), *(request.get("eos_token_ids") or ())]
    return tuple(sorted({int(t) for t in asked}))


class _Gone(Enum):
    """Put into a request's queue in place of an output."""

    CLIENT = "client"
    ENGINE = "engine"


_Queue = asyncio.Queue[Output | _Gone]


class RequestDesk:
    """Hands requests to the engine and its outputs back to them.

    `handle` is what Dynamo calls; `pump` is the one reader of the engine's outputs. While the desk
    is closed requests are sent on to another rank.
    """

    def __init__(self, max_context: int, meter: TokenMeter | None = None) -> None:
        self.meter = meter or TokenMeter()
        """Sees every token that is handed out here."""
        self._max_context = max_context
        self._engine: Engine | None = None
        self._queues: dict[str, _Queue] = {}
        self._numbers = itertools.count()

    async def idle(self) -> None:
        """Return when no request is under way."""
        while self._queues:
            await asyncio.sleep(_IDLE_POLL_S)

    @property
    def is_open(self) -> bool:
        """Requests are admitted."""
        return self._engine is not None

    def open(self, engine: Engine) -> None:
        """Admit requests to `engine`."""
        self._engine = engine

    def close(self) -> None:
        """Admit no more; those under way go on."""
        self._engine = None

    async def pump(self, engine: Engine) -> None:
        """Hand out outputs until the engine goes: raises EngineGone, and its requests move."""
        try:
            async for output in engine.outputs():
                queue = self._queues.get(output.request_id)
                if queue is not None:
                    queue.put_nowait(output)
        finally:
            for queue in self._queues.values():
                queue.put_nowait(_Gone.ENGINE)
        raise EngineGone("the engine ended its output")

    async def handle(
        self, request: Mapping[str, Any], context: Context
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Run one request: yields Dynamo's outputs, the last with a finish reason.

        Raises RequestRefused for a request that no rank can serve, and RequestMoved when it has to
        go on elsewhere from the tokens yielded so far. A client that went away ends it quietly.
        """
        request_id = f"{context.id()}/{next(self._numbers)}"
        asked = engine_request(request, context.id(), request_id, self._max_context)
        engine = self._engine
        if engine is None:
            raise RequestMoved("this rank admits no requests")
        queue = self._queues[request_id] = _Queue()
        stopped = context.async_killed_or_stopped()
        stopped.add_done_callback(lambda _: queue.put_nowait(_Gone.CLIENT))
        last: Output | _Gone = _Gone.CLIENT
        stream = self.meter.stream(context.id())
        try:
            await _submit(engine, asked)
            while isinstance(last := await queue.get(), Output):
                stream.tokens(len(last.tokens))
                if last.tokens or last.finish in _REASONS:
                    yield _item(last)
                if last.finish is not None:
                    break
            _end(last)
        finally:
            del self._queues[request_id]
            stopped.cancel()
            stream.ended(_outcome(last))
            if last is _Gone.CLIENT or (isinstance(last, Output) and last.finish is None):
                await _cancel(engine, request_id)


_REASONS = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
}
"""Ends that the client is told of. The others go on elsewhere."""


def _outcome(last: Output | _Gone) -> str:
    """How a request ended here, for the metrics."""
    if isinstance(last, Output) and last.finish is not None:
        return _REASONS.get(last.finish, MOVED)
    return MOVED if last is _Gone.ENGINE else GONE


def _item(output: Output) -> dict[str, Any]:
    item: dict[str, Any] = {"token_ids": list(output.tokens), "index": 0}
    if output.finish in _REASONS:
        item["finish_reason"] = _REASONS[output.finish]
    return item


def _end(last: Output | _Gone) -> None:
    """Raise RequestMoved if what ended a request is not its own end."""
    if last is _Gone.ENGINE:
        raise RequestMoved("the engine is gone")
    if isinstance(last, Output) and last.finish not in _REASONS:
        raise RequestMoved(last.reason or f"{last.finish} on this rank")


async def _submit(engine: Engine, asked: Request) -> None:
    try:
        await engine.submit(asked)
    except EngineError as exc:
        # It drains, or is gone. Another rank is asked; the frontend bounds how often.
        raise RequestMoved(str(exc)) from exc


async def _cancel(engine: Engine, request_id: str) -> None:
    with suppress(EngineError):
        await engine.cancel(request_id)
