"""One instance of Dynamo a rank, and a stand-in while its card changes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from dynamo_elastic.dynamo.base import ControlRoute, Handler, InstanceSpec, Load
from dynamo_elastic.dynamo.seat import Seat
from dynamo_elastic.errors import RegistrationFailed

log = logging.getLogger(__name__)

_SETTLE_S = 0.5
"""The frontend sees a change a moment after we do, on a busy machine a few tenths of a second."""


class DynamoInstance:
    """dynamo.base.Registrar over Dynamo's runtime. Registered many times, shut down once.

    Owns a DistributedRuntime, its lease and its keys. DYN_* and ETCD_* must be in the environment
    before it is made. A runtime ends with its lease: registering then makes a new one.

    A card can't be changed in place, and while the only card is away the frontend answers 404. So
    a second instance of this process stands in while the first one's card is replaced.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        handler: Handler,
        routes: Mapping[str, ControlRoute] | None = None,
        *,
        system_port: int = 0,
    ) -> None:
        """`routes` are answered under /engine/control/NAME of `system_port`, beside Dynamo's health
        and metrics of this process. 0: none of it."""
        self._spec = spec
        self._handler = handler
        self._main = Seat(spec, handler, routes or {}, system_port=system_port)
        self._stand_in: Seat | None = None

    @property
    def instance_id(self) -> int:
        """Dynamo's name for this instance: the id of its lease."""
        return self._main.instance_id

    async def register(self, runtime_data: Mapping[str, str]) -> int:
        """See Registrar. Returns once a Dynamo client of this process sees instance and card."""
        tag = json.dumps(dict(sorted(runtime_data.items())))
        if self._main.published:
            try:
                await self._replace(tag)
            except RegistrationFailed as exc:
                log.warning("registered anew: %s", exc)
            else:
                return self.instance_id
        await self._main.publish(tag)
        self._main.start_reporting()
        return self.instance_id

    async def _replace(self, tag: str) -> None:
        """Change the card; the instance, its streams and its reports to the planner stay."""
        if self._stand_in is None:
            self._stand_in = Seat(self._spec, self._handler, {}, system_port=0)
        try:
            await self._stand_in.publish(tag)
            await asyncio.sleep(_SETTLE_S)
            await self._main.replace_card(tag)
            await asyncio.sleep(_SETTLE_S)
        finally:
            await self._stand_in.withdraw()

    async def unregister(self) -> None:
        """See Registrar."""
        try:
            if self._stand_in is not None:
                await self._stand_in.withdraw()
        finally:
            await self._main.withdraw()

    def visible(self) -> bool:
        """See Registrar."""
        return self._main.published and not self._main.ended

    def owns(self, instance_id: int) -> bool:
        """See Registrar."""
        seats = (self._main, self._stand_in)
        return instance_id in {seat.instance_id for seat in seats if seat is not None}

    def report(self, load: Load) -> None:
        """See Registrar."""
        self._main.report(load)

    async def shutdown(self) -> None:
        """Unregister, and end the runtimes and their leases. Not to be used again."""
        try:
            await self.unregister()
        finally:
            for seat in (self._stand_in, self._main):
                if seat is not None:
                    await seat.close()
