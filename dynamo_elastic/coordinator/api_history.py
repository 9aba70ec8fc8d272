"""The routes of the HTTP API that read what is kept of operations that have ended."""

from __future__ import annotations

import asyncio

from aiohttp import web

from dynamo_elastic.coordinator.api_answers import Malformed, fault, reply
from dynamo_elastic.coordinator.api_models import OperationList
from dynamo_elastic.coordinator.api_routes import DEFAULT_LISTED, MAX_LISTED
from dynamo_elastic.coordinator.api_views import summary_view
from dynamo_elastic.report.history import History


class HistoryPages:
    """Handlers; `name` is the coordinator's, whose disk it is."""

    def __init__(self, history: History, name: str) -> None:
        self._history = history
        self._name = name

    async def get_operations(self, request: web.Request) -> web.Response:
        stories = await asyncio.to_thread(self._history.newest, _limit(request))
        page_of = self._history.page_of
        listed = [summary_view(s, page_of(s.operation_id)) for s in stories]
        return reply(OperationList(operations=listed, kept_by=self._name))

    async def get_report(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        path = self._history.page_of(name)
        if path is None:
            kept = ", ".join(self._history.names()[:5]) or "none"
            return fault(404, f"no report of {name!r} is kept here; the newest are: {kept}")
        html = await asyncio.to_thread(path.read_text)
        headers = {
            "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
            "X-Content-Type-Options": "nosniff",
        }
        return web.Response(text=html, content_type="text/html", headers=headers)


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LISTED))
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LISTED:
        raise Malformed([f"limit: must be 1 to {MAX_LISTED}, got {text!r}"])
    return int(text)
