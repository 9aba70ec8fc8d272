"""HTTP routes of a rank's API process, beside vLLM's own of elastic expert parallelism.

    POST /elastic_ep/attach        this rank, which has left, joins the group that scales up to it;
                                   in its body, if any, what differs from its boot: elastic.place
    POST /elastic_ep/fail          {"reason": ...}: the operation that is being prepared is over
    POST /elastic_ep/facts         what this rank's engine says of itself

The first answers when the rank is ready for the commit. vLLM refuses every route of a rank that has
left, but for a few; ours are among those.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from vllm.entrypoints.serve.elastic_ep import api_router, middleware
from vllm.version import __version__

from dynamo_elastic.engine.vllm.elastic.place import parallel_of
from dynamo_elastic.engine.vllm.v0_33.hooks import ROUTE_HOOKS, check_hooks
from dynamo_elastic.errors import ConfigError, ElasticError

ATTACH, FAIL, FACTS = "/elastic_ep/attach", "/elastic_ep/fail", "/elastic_ep/facts"


def _coordinator(request: Request) -> Any:
    client = request.app.state.engine_client.engine_core
    return client.external_eep_coordinator


async def attach(request: Request) -> dict[str, Any]:
    """400 if its place can't be read, 409 if this rank is in a group, 500 if it did not come to be
    ready: it is as before then."""
    try:
        place = await request.json() if await request.body() else {}
        parallel_of(place)
    except (ValueError, ConfigError) as exc:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(exc)) from exc
    try:
        seconds: dict[str, Any] = await _coordinator(request).attach(place)
    except (ElasticError, RuntimeError) as exc:
        code = HTTPStatus.CONFLICT if "is in a group" in str(exc) else None
        raise HTTPException(code or HTTPStatus.INTERNAL_SERVER_ERROR, str(exc)) from exc
    return seconds


async def fail(request: Request) -> dict[str, Any]:
    """Idempotent; nothing happens if no operation is being prepared."""
    try:
        reason = (await request.json())["reason"]
    except (ValueError, KeyError, TypeError) as exc:
        raise HTTPException(HTTPStatus.BAD_REQUEST, 'send {"reason": "..."}') from exc
    _coordinator(request).tell_failure(str(reason))
    return {}


async def facts(request: Request) -> dict[str, Any]:
    """By worker: groups, graphs, memory."""
    engine = request.app.state.engine_client
    return {"workers": await engine.collective_rpc("elastic_facts", timeout=60)}


def install() -> None:
    """vLLM's router has our routes, when it is put into an application after this. Idempotent.
    Raises ConfigError if this vLLM has none."""
    check_hooks(__version__, hooks=ROUTE_HOOKS)
    if ATTACH in {route.path for route in api_router.router.routes}:
        return
    for path, call in ((ATTACH, attach), (FAIL, fail), (FACTS, facts)):
        api_router.router.add_api_route(path, call, methods=["POST"])
    middleware._SCALING_OBSERVABILITY_PATHS |= {ATTACH, FAIL, FACTS}
