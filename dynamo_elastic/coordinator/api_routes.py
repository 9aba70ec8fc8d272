"""The routes of the HTTP API, and the OpenAPI document that says the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dynamo_elastic import __version__
from dynamo_elastic.coordinator.api_models import (
    Fault,
    Health,
    Operation,
    OperationList,
    SafeToDelete,
    StatusView,
    TargetAnswer,
    TargetRequest,
)

MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 2.0

_BAD_TOKEN = {401: (Fault, "No bearer token, or not the right one.")}
_NO_STORE = {503: (Fault, "etcd does not answer. A write may have happened: send it again.")}


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. `name` is its operation id and the handler's name."""

    method: str
    path: str
    name: str
    summary: str
    responses: Mapping[int, tuple[type[BaseModel] | None, str]]
    body: type[BaseModel] | None = None
    parameters: tuple[Mapping[str, Any], ...] = field(default=())
    open: bool = False
    """Needs no token."""
    media: str = "application/json"
    """Of the answer when all is well."""


_WAIT = {
    "name": "wait_s",
    "in": "query",
    "description": "How long to wait for more than `accepted`.",
    "schema": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S, "default": DEFAULT_WAIT_S},
}
MAX_LISTED = 100
DEFAULT_LISTED = 20
_LIMIT = {
    "name": "limit",
    "in": "query",
    "description": "How many at most.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": DEFAULT_LISTED},
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}

ROUTES: tuple[Route, ...] = (
    Route(
        "put",
        "/v1/target",
        "put_target",
        "Ask for a number of ranks. The newest target wins, whoever asked.",
        {
            200: (TargetAnswer, "Reached, or the width in force already."),
            202: (TargetAnswer, "Accepted, queued behind another operation, or running."),
            400: (Fault, "Malformed, or the request id is another target's; nothing was changed."),
            409: (TargetAnswer, "Superseded by a newer target, or given up after failures."),
            422: (TargetAnswer, "Refused: not a legal width; nothing was changed."),
            **_BAD_TOKEN,
            **_NO_STORE,
        },
        body=TargetRequest,
        parameters=(_WAIT,),
    ),
    Route(
        "get",
        "/v1/status",
        "get_status",
        "Ranks, whose target is in force, the operation under way and the last one.",
        {200: (StatusView, "Read at one revision."), **_BAD_TOKEN, **_NO_STORE},
    ),
    Route(
        "get",
        "/v1/operations",
        "get_operations",
        "Operations that ended while the coordinator that answers led, newest first.",
        {
            200: (OperationList, "As many as are kept (observe.keep_operations), and asked for."),
            400: (Fault, "Malformed."),
            **_BAD_TOKEN,
        },
        parameters=(_LIMIT,),
    ),
    Route(
        "get",
        "/v1/operations/{id}",
        "get_operation",
        "The operation under way, or one that ended.",
        {
            200: (Operation, "Phase, participants, deadline, last failure."),
            404: (Fault, "Neither under way, nor the last one, nor kept by this coordinator."),
            **_BAD_TOKEN,
            **_NO_STORE,
        },
        parameters=(_ID,),
    ),
    Route(
        "get",
        "/v1/operations/{id}/report",
        "get_report",
        "The report of an operation that ended: one HTML page.",
        {200: (None, "HTML."), 404: (Fault, "Not kept by this coordinator."), **_BAD_TOKEN},
        parameters=(_ID,),
        media="text/html",
    ),
    Route(
        "get",
        "/v1/safe-to-delete",
        "get_safe_to_delete",
        "Slots whose pod or machine may go: released after a commit, and not wanted next.",
        {200: (SafeToDelete, "Read at one revision."), **_BAD_TOKEN, **_NO_STORE},
    ),
    Route(
        "get",
        "/healthz",
        "get_health",
        "Whether this coordinator and etcd answer.",
        {200: (Health, "They do."), **_NO_STORE},
        open=True,
    ),
    Route(
        "get",
        "/openapi.json",
        "get_openapi",
        "This document.",
        {200: (None, "OpenAPI 3.1.")},
        open=True,
    ),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of ROUTES."""
    models = {m for r in ROUTES for m, _ in r.responses.values() if m is not None}
    bodies = {r.body for r in ROUTES if r.body is not None}
    _, schemas = models_json_schema(
        [
            *((m, "serialization") for m in sorted(models, key=lambda m: m.__name__)),
            *((m, "validation") for m in sorted(bodies, key=lambda m: m.__name__)),
        ],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dynamo_elastic coordinator",
            "version": __version__,
            "description": "Drive and watch the number of ranks of an elastic deployment. "
            "Every coordinator answers; the leader alone acts.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:9087"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "What coordinator.api.token_file holds.",
                }
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": route.name, "summary": route.summary}
    if route.open:
        made["security"] = []
    if route.parameters:
        made["parameters"] = [dict(p) for p in route.parameters]
    if route.body is not None:
        made["requestBody"] = {"required": True, "content": _json(route.body)}
    made["responses"] = {
        str(code): {
            "description": text,
            "content": _json(model, route.media if code < 400 else "application/json"),
        }
        for code, (model, text) in sorted(route.responses.items())
    }
    return made


def _json(model: type[BaseModel] | None, media: str = "application/json") -> dict[str, Any]:
    bare = {"type": "object" if media == "application/json" else "string"}
    schema = {"$ref": f"#/components/schemas/{model.__name__}"} if model else bare
    return {media: {"schema": schema}}
