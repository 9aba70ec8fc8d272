"""The HTTP API of a coordinator: for any autoscaler that is not Dynamo's planner.

Every coordinator serves it, whether it leads or not: reads come from etcd, and a write is the
target's record there, which the leader follows. Nothing here commands anybody.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time

from aiohttp import web
from pydantic import ValidationError

from dynamo_elastic.config_sections import ApiConfig, ScaleConfig
from dynamo_elastic.coordinator import api_views as views
from dynamo_elastic.coordinator.api_answers import Handler, Malformed, errors, fault, reply
from dynamo_elastic.coordinator.api_history import HistoryPages
from dynamo_elastic.coordinator.api_models import (
    Health,
    SafeToDelete,
    TargetAnswer,
    TargetRequest,
    TargetState,
)
from dynamo_elastic.coordinator.api_routes import DEFAULT_WAIT_S, MAX_WAIT_S, ROUTES, openapi
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.status import Status, read_status, status_of
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.coordinator.stories import story_of
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.errors import ConfigError, StoreUnavailable
from dynamo_elastic.report.history import History, NoSuchOperation
from dynamo_elastic.report.story import StoryError
from dynamo_elastic.secret_files import is_token, read_secret_file
from dynamo_elastic.types import OperationId

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 << 10
_SHUTDOWN_S = 1.0
_PAUSE_S = 0.1
_CODES = {
    TargetState.REFUSED: 422,
    TargetState.SUPERSEDED: 409,
    TargetState.FAILED: 409,
    TargetState.REACHED: 200,
    TargetState.UNCHANGED: 200,
}


class ApiServer:
    """Serves ROUTES from start() to close(). Owns no store."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        config: ApiConfig,
        scale: ScaleConfig,
        name: str,
        *,
        token: str,
        history: History,
    ) -> None:
        """`token`: what every request must carry, but for those that say little (Route.open).
        `history`: operations that this coordinator has ended."""
        self._store = store
        self._keys = keys
        self._config = config
        self._scale = scale
        self._name = name
        self._token = token
        self._history = history
        pages = HistoryPages(history, name)
        self.get_operations, self.get_report = pages.get_operations, pages.get_report
        self._runner: web.AppRunner | None = None

    def app(self) -> web.Application:
        """The application: exactly ROUTES."""
        app = web.Application(middlewares=[errors, self._guard], client_max_size=_MAX_BODY_BYTES)
        for route in ROUTES:
            app.router.add_route(route.method.upper(), route.path, getattr(self, route.name))
        return app

    async def start(self) -> None:
        """Listen, unless the port is 0. Raises ConfigError if it can't be had, or the certificate
        can't be read."""
        if not self._config.port:
            return
        self._runner = web.AppRunner(
            self.app(), access_log=None, shutdown_timeout=_SHUTDOWN_S, handle_signals=False
        )
        await self._runner.setup()
        try:
            tls = _tls(self._config)
            site = web.TCPSite(self._runner, self._config.host, self._config.port, ssl_context=tls)
            await site.start()
        except ConfigError:
            await self.close()
            raise
        except OSError as exc:
            await self.close()
            where = f"{self._config.host}:{self._config.port}"
            raise ConfigError(
                [f"coordinator.api.port: can't listen on {where} ({exc.strerror}); choose another"]
            ) from exc
        log.info("HTTP API on %s:%d", self._config.host, self._config.port)

    async def close(self) -> None:
        """Stop listening, and end requests that wait. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def put_target(self, request: web.Request) -> web.Response:
        body = await _body(request)
        wait_s = _wait_s(request)
        status = await read_status(self._store, self._keys)
        answer = views.joined(status, body.target) if body.request_id is None else None
        if answer is None:
            request_id = await request_scale(
                self._store,
                self._keys,
                body.target,
                body.source,
                detail=body.detail,
                request_id=body.request_id or "",
            )
            answer = await self._progress(request_id, body.target, wait_s)
        return reply(answer, _CODES.get(answer.state, 202))

    async def _progress(self, request_id: str, ranks: int, wait_s: float) -> TargetAnswer:
        """What becomes of the request within `wait_s`: as soon as it is more than accepted."""
        status = await read_status(self._store, self._keys)
        try:
            async with asyncio.timeout(wait_s):
                while views.progress_of(status, request_id, ranks).state == "accepted":
                    status = await self._next_status(status)
        except TimeoutError:
            log.debug("request %s: no answer within %g s", request_id, wait_s)
        return views.progress_of(status, request_id, ranks)

    async def _next_status(self, before: Status) -> Status:
        """The status once target, outcome or operation is not as in `before`."""
        looked_at = (self._keys.target, self._keys.outcome, self._keys.operation)

        def changed(now: Status) -> bool:
            return any(now.revision(k) != before.revision(k) for k in looked_at)

        while True:
            try:
                async with self._store.watch(self._keys.prefix) as watch:
                    now = status_of(watch.snapshot, self._keys)
                    if changed(now):
                        return now
                    async for event in watch:
                        if event.key in looked_at:
                            break
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_S)

    async def get_status(self, request: web.Request) -> web.Response:
        status = await read_status(self._store, self._keys)
        view = views.status_view(
            status,
            deployment=self._keys.deployment,
            name=self._name,
            now_s=time.time(),
            timeout_s=self._scale.operation_timeout_s,
            page_of=self._history.page_of,
        )
        return reply(view)

    async def get_operation(self, request: web.Request) -> web.Response:
        status = await read_status(self._store, self._keys)
        known = {o.operation_id: o for o in (status.last, status.operation) if o is not None}
        name = request.match_info["id"]
        found = known.get(OperationId(name))
        try:
            story = (
                self._history.load(name)
                if found is None
                else story_of(
                    found,
                    self._keys.deployment,
                    self._scale.operation_timeout_s,
                    now_s=time.time(),
                )
            )
        except (NoSuchOperation, StoryError) as exc:
            names = ", ".join(known) or "none"
            return fault(404, f"neither under way nor the last one (those are: {names}); {exc}")
        return reply(views.operation_view(story, self._history.page_of(name)))

    async def get_safe_to_delete(self, request: web.Request) -> web.Response:
        status = await read_status(self._store, self._keys)
        slots = [views.slot_view(m) for m in views.safe_to_delete(status)]
        return reply(SafeToDelete(slots=slots))

    async def get_health(self, request: web.Request) -> web.Response:
        await self._store.get(self._keys.leader)
        return reply(Health())

    async def get_openapi(self, request: web.Request) -> web.Response:
        return web.json_response(openapi())

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in who has the token."""
        is_open = any(r.open for r in ROUTES if r.path == request.path)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if not is_open and not (scheme.lower() == "bearer" and is_token(given, self._token)):
            answer = fault(401, "a bearer token is required (coordinator.api.token_file)")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        return await handler(request)


def _tls(config: ApiConfig) -> ssl.SSLContext | None:
    """What HTTPS is served with; None for HTTP."""
    if config.cert_file is None or config.key_file is None:
        return None
    read_secret_file(config.key_file, "coordinator.api.key_file")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.cert_file, config.key_file)
    except OSError as exc:
        raise ConfigError(
            [f"coordinator.api.cert_file: {config.cert_file} and its key can't be used ({exc})"]
        ) from exc
    return context


async def _body(request: web.Request) -> TargetRequest:
    if request.content_type != "application/json":
        raise Malformed(["content-type: must be application/json"])
    try:
        return TargetRequest.model_validate_json(await request.read())
    except ValidationError as exc:
        faults = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in exc.errors()]
        raise Malformed(faults) from exc


def _wait_s(request: web.Request) -> float:
    text = request.query.get("wait_s", str(DEFAULT_WAIT_S))
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise Malformed([f"wait_s: must be 0 to {MAX_WAIT_S:g}, got {text!r}"])
    return wait_s
