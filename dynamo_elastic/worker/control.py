"""Control routes of a worker, through Dynamo: POST /engine/control/NAME on its system port.

They read the stored status and write targets, as the command line and the HTTP API do: whoever is
asked, the coordinator alone acts, and the newest target wins.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dynamo_elastic.coordinator.api_models import TargetAnswer, TargetRequest, TargetState
from dynamo_elastic.coordinator.api_views import progress_of, status_view
from dynamo_elastic.coordinator.records import CapacityRecord, Keys
from dynamo_elastic.coordinator.status import Status, read_status
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.dynamo.base import ControlRoute
from dynamo_elastic.errors import ElasticError, TargetRefused
from dynamo_elastic.secret_files import is_token
from dynamo_elastic.types import WorkerId

SOURCE = "control"
_ANSWER_WITHIN_S = 5.0
"""To be told whether a target is acted on; that takes a fraction of it."""
_POLL_S = 0.05
_TOKEN_REMEDY = "is required, and must be what coordinator.api.token_file holds"
_NOT_MET = (TargetState.REFUSED, TargetState.FAILED, TargetState.SUPERSEDED)

_CAPACITY = TypeAdapter(CapacityRecord)


class ElasticControl:
    """The routes of one worker. Answers carry Dynamo's `status` ('ok' or 'error') and `message`."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        worker_id: WorkerId,
        *,
        operation_timeout_s: float,
        token: str,
    ) -> None:
        """`token`: what every body must carry. Dynamo's server shows us no header."""
        self._token = token
        self._store = store
        self._keys = keys
        self._worker = worker_id
        self._operation_timeout_s = operation_timeout_s

    def routes(self) -> dict[str, ControlRoute]:
        """Name -> route. None of them raises ElasticError."""
        return {
            "elastic_status": self._admitted(self.elastic_status),
            "scale_elastic": self._admitted(self.scale_elastic),
            "park": self._admitted(self.park),
        }

    def _admitted(self, route: ControlRoute) -> ControlRoute:
        """`route`, for those who have the token. It is taken from what the route is given."""

        async def answer(body: dict[str, Any]) -> dict[str, Any]:
            rest = {name: value for name, value in body.items() if name != "token"}
            if not is_token(str(body.get("token", "")), self._token):
                return {"status": "error", "message": f"token: {_TOKEN_REMEDY}"}
            return await _answering(route)(rest)

        return answer

    async def elastic_status(self, body: dict[str, Any]) -> dict[str, Any]:
        """This worker's place, which widths can be had, and the deployment as the HTTP API has
        it."""
        _nothing_in(body)
        now = await read_status(self._store, self._keys)
        me, in_force = now.members.get(self._worker), now.in_force
        view = status_view(
            now,
            deployment=self._keys.deployment,
            name=self._worker,
            now_s=time.time(),
            timeout_s=self._operation_timeout_s,
        )
        return {
            "status": "ok",
            "message": now.notice,
            "worker": self._worker,
            "state": me.state.value if me is not None else "gone",
            "rank": in_force.rank_of(self._worker) if in_force is not None else None,
            "capacity": _CAPACITY.dump_python(now.capacity, mode="json") if now.capacity else None,
            "deployment": view.model_dump(mode="json"),
        }

    async def scale_elastic(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for `target` ranks, an absolute number. Says which operation does it, or why none.

        `request_id`, `source` and `detail` are as in the HTTP API.
        """
        asked = TargetRequest.model_validate({"source": SOURCE, "detail": self._worker} | body)
        request_id = await request_scale(
            self._store,
            self._keys,
            asked.target,
            asked.source,
            detail=asked.detail,
            request_id=asked.request_id or "",
        )
        return await self._answer(request_id, asked.target)

    async def park(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for the next legal width below the one in force, with this rank among the leavers."""
        _nothing_in(body)
        width = _width_without(await read_status(self._store, self._keys), self._worker)
        request_id = await request_scale(
            self._store,
            self._keys,
            width,
            SOURCE,
            detail=f"park {self._worker}",
            leaving=self._worker,
        )
        return await self._answer(request_id, width)

    async def _answer(self, request_id: str, ranks: int) -> dict[str, Any]:
        progress = await self._progress(request_id, ranks)
        status = "error" if progress.state in _NOT_MET else "ok"
        body = progress.model_dump(mode="json")
        return {"status": status, "message": progress.reason, **body}

    async def _progress(self, request_id: str, ranks: int) -> TargetAnswer:
        """What the coordinator says of the request, or, if it does not say in time, that it is
        stored."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                while True:
                    now = await read_status(self._store, self._keys)
                    progress = progress_of(now, request_id, ranks)
                    if progress.state is not TargetState.ACCEPTED:
                        return progress
                    await asyncio.sleep(_POLL_S)
        return TargetAnswer(
            request_id=request_id,
            target=ranks,
            state=TargetState.ACCEPTED,
            reason=f"the coordinator has not answered within {_ANSWER_WITHIN_S:g} s",
        )


def _width_without(now: Status, worker: WorkerId) -> int:
    """The next legal width below the one in force. Raises TargetRefused if this worker can't
    leave."""
    if now.in_force is None or now.in_force.rank_of(worker) is None:
        raise TargetRefused(f"park: {worker} has no rank in force; nothing to do")
    if now.capacity is None:
        raise TargetRefused("park: no coordinator has said which widths are legal; is one running?")
    below = [n for n in now.capacity.legal if n < now.width]
    if not below:
        legal = ", ".join(str(n) for n in now.capacity.legal)
        raise TargetRefused(
            f"park: {now.width} ranks serve, and no smaller width is legal (legal: {legal}); "
            "scale up first"
        )
    return below[-1]


def _nothing_in(body: dict[str, Any]) -> None:
    if body:
        raise TargetRefused(f"{', '.join(sorted(body))}: unknown; this route takes no settings")


def _answering(route: ControlRoute) -> ControlRoute:
    """`route`, with what it raises as its answer."""

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await route(body)
        except ValidationError as exc:
            faults = [
                f"{'.'.join(str(p) for p in e['loc'])}: {e['msg'].lower()}" for e in exc.errors()
            ]
            return {"status": "error", "message": "; ".join(faults)}
        except ElasticError as exc:
            return {"status": "error", "message": str(exc)}

    return answer
