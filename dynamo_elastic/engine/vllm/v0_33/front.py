"""What the API process of a rank that boots without a group does between its boot and its identity,
whoever serves its requests after that."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import msgspec
from vllm.entrypoints.serve.elastic_ep.middleware import set_elastic_ep_rank_retired

from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.vllm.calls import WORKER_ATTACH
from dynamo_elastic.engine.vllm.life import say_detached, wait_attach
from dynamo_elastic.engine.vllm.replica import Replica

_FIRST_TIMEOUT_S = 120.0
"""For the first tokens, for which kernels are compiled."""
_CALL_TIMEOUT_S = 30.0
_HELD = {"multicast": 0, "ipc_imports": 0, "managed_bytes": 0}
"""See snapshot.cuda_findings.REPORTED: it has no peer, and nothing here makes one of the others."""
_log = logging.getLogger(__name__)


async def live_detached(
    engine: Any, control_dir: Path, began_s: float
) -> tuple[Attach, dict[str, Any]]:
    """`engine`, vLLM's AsyncLLM, captures its graphs, generates alone, lets go of all that an image
    must not hold, and says so in `detached.json`; returns with the identity of `attach.json`, which
    all of its processes have then, and with what Replica.attach() opened. It has left, and can be
    attached to a group."""
    replica = Replica(engine, control_dir)
    utility = engine.engine_core.call_utility_async
    parts_s = {"boot": time.monotonic() - began_s}

    async def timed(name: str, act: Any) -> Any:
        since_s = time.monotonic()
        found = await act
        parts_s[name] = time.monotonic() - since_s
        _log.warning("%s: %.2f s", name, parts_s[name])
        return found

    set_elastic_ep_rank_retired(True)
    await timed("capture", utility("capture_elastic_ep"))
    # The sampler is compiled at the first request that needs it.
    await timed("sampled", replica.probe(temperature=1.0, timeout_s=_FIRST_TIMEOUT_S))
    probe = await timed("greedy", replica.probe(timeout_s=_FIRST_TIMEOUT_S))
    left = await timed("detach", utility("detach_elastic_ep"))
    await timed("release", replica.release())
    say_detached(control_dir, began_s, probe=list(probe), parts_s=parts_s, left=left, cuda=_HELD)
    attach = await wait_attach(control_dir)
    return attach, await replica.attach(attach)


async def rest(engine: Any, control_dir: Path, began_s: float) -> Attach:
    """`engine`, which has left its group and let go, is to be parked: `detached.json` says so.
    Returns with the identity of the next `attach.json`, which all of its processes have then."""
    say_detached(control_dir, began_s, cuda=_HELD)
    attach = await wait_attach(control_dir)
    renew(attach)
    sent = msgspec.to_builtins(attach)
    await engine.collective_rpc(WORKER_ATTACH, timeout=_CALL_TIMEOUT_S, args=(sent,))
    call = engine.engine_core.call_utility_async("renew_elastic_ep", sent)
    await asyncio.wait_for(call, _CALL_TIMEOUT_S)
    return attach
