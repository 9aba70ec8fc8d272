"""Answers of the HTTP API, and the one for each failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web
from pydantic import BaseModel

from dynamo_elastic.coordinator.api_models import Fault
from dynamo_elastic.coordinator.records import RecordError
from dynamo_elastic.errors import ConfigError, RequestIdTaken, StoreError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Malformed(ConfigError):
    """A request's body or query is wrong: one line for each field."""


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure is a Fault with the code that ROUTES says."""
    try:
        return await handler(request)
    except web.HTTPException as exc:
        if exc.status < HTTPStatus.BAD_REQUEST:
            raise
        return fault(exc.status, exc.reason or "failed")
    except Malformed as exc:
        return fault(400, "the request is malformed", *exc.faults)
    except RequestIdTaken as exc:
        return fault(400, str(exc))
    except (StoreError, RecordError) as exc:
        return fault(503, f"etcd: {exc}")


def reply(view: BaseModel, code: int = 200) -> web.Response:
    return web.Response(status=code, text=view.model_dump_json(), content_type="application/json")


def fault(code: int, error: str, *faults: str) -> web.Response:
    return reply(Fault(error=error, faults=list(faults)), code)
