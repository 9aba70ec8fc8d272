"""One vLLM engine with its process tree: warmed up, let go for an image, attached, asked.

Everything here goes through AsyncLLM's own calls, collective_rpc() to the worker and utility calls
to the engine core.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import msgspec
from vllm import SamplingParams

from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.vllm.calls import (
    CORE_ATTACH,
    CORE_RELEASE,
    WORKER_ATTACH,
    WORKER_RELEASE,
)
from dynamo_elastic.engine.vllm.release import (
    processes_of_session,
    release_process,
    unlink_shared_memory,
    unlink_sockets,
)
from dynamo_elastic.errors import EngineError

PROBE_PROMPT = tuple(range(3, 11))
PROBE_TOKENS = 8

_PROBE_TIMEOUT_S = 15.0
_CALL_TIMEOUT_S = 30.0


class Replica:
    """An AsyncLLM of ours. `client` stays with its owner."""

    def __init__(self, client: Any, control_dir: Path) -> None:
        self._client = client
        self._control_dir = control_dir

    async def probe(
        self, *, temperature: float = 0.0, timeout_s: float = _PROBE_TIMEOUT_S
    ) -> tuple[int, ...]:
        """Tokens after a fixed prompt, greedy unless told otherwise. Raises EngineError if they
        don't come in time."""
        params = SamplingParams(temperature=temperature, max_tokens=PROBE_TOKENS, ignore_eos=True)
        prompt = {"prompt_token_ids": list(PROBE_PROMPT)}
        last: Any = None
        try:
            async with asyncio.timeout(timeout_s):
                async for output in self._client.generate(prompt, params, f"probe-{uuid.uuid4()}"):
                    last = output
        except TimeoutError as exc:
            raise EngineError(f"the probe did not end within {timeout_s:g} s") from exc
        return tuple(last.outputs[0].token_ids)

    async def release(self) -> None:
        """No process of the tree holds what an image must not hold. Generation must be paused."""
        await self._in_core(CORE_RELEASE)
        await self._client.collective_rpc(WORKER_RELEASE, timeout=_CALL_TIMEOUT_S)
        release_process()
        unlink_shared_memory(processes_of_session())
        unlink_sockets(self._control_dir)

    async def attach(self, attach: Attach) -> dict[str, Any]:
        """Every process has the identity of `attach`. Returns where the engine core publishes:
        {'fpm_port': N, 'events': address, '' for none}."""
        renew(attach)
        sent = msgspec.to_builtins(attach)
        await self._client.collective_rpc(WORKER_ATTACH, timeout=_CALL_TIMEOUT_S, args=(sent,))
        opened: dict[str, Any] = await self._in_core(CORE_ATTACH, sent)
        return opened

    async def abort_all(self) -> None:
        """Every request of the engine ends, with an output that says so."""
        ids = list(self._client.output_processor.request_states)
        await self._client.abort(ids, internal=True)

    async def _in_core(self, call: str, *arguments: Any) -> Any:
        try:
            answer = self._client.engine_core.call_utility_async(call, *arguments)
            return await asyncio.wait_for(answer, _CALL_TIMEOUT_S)
        except TimeoutError as exc:
            raise EngineError(f"the engine core did not answer {call} in time") from exc
