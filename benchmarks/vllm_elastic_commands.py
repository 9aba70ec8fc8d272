"""The commands of vllm_elastic.py: each takes up the group that the last one left, or starts one,
and leaves nobody unless it was told to."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from vllm_elastic_faults import Fault, inject
from vllm_elastic_ramp import (
    Change,
    Mode,
    calibrated_rate,
    no_change,
    ramp,
    restarted_with,
    scaled_to,
)
from vllm_elastic_ranks import KEPT, OURS, PARKED, UPSTREAM, Group, Setup
from vllm_elastic_resize import Limits
from vllm_elastic_rounds import rounds
from vllm_elastic_session import Load, Session, boot, end, lives
from vllm_elastic_tiers import imaging_for

_CALIBRATED_S = 6.0
_SHARE = 0.6
"""Of what the small group bears, that the trace begins with: it ends with a fifth more than all."""
FAULTS = {
    UPSTREAM: (Fault.COLD, Fault.COMMIT),
    OURS: (Fault.RESTORED, Fault.STREAM, Fault.READY, Fault.STOPPED),
}
_MODES = {UPSTREAM: (Mode.RESTARTED,), OURS: (Mode.LARGE, Mode.SMALL, Mode.SCALED)}


class Commands:
    """One command line's."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = arguments, folder
        self._limits = Limits(arguments.scale_timeout_s, arguments.joiner_timeout_s)
        self._load = Load(
            arguments.clients, arguments.tokens, arguments.serve_s, arguments.settle_s
        )
        self._deadline_s = time.monotonic() + arguments.deadline_s
        self._imaging: Any = None
        self._session: Session | None = None

    @classmethod
    def names(cls) -> list[str]:
        return [*_KEEPS, *_ENDS]

    async def do(self) -> None:
        """Raises SystemExit if the group did not do as it was told, or the time is over."""
        name = self._given.command
        command = {**_KEEPS, **_ENDS}[name]
        stays = False
        try:
            with imaging_for(self._given.leavers, self._folder) as self._imaging:
                async with asyncio.timeout(self._given.deadline_s):
                    stays = name in _KEEPS
                    await command(self)
                    stays = stays or self._given.keep
        except TimeoutError:
            stays = False
            raise SystemExit(f"{name} was not done in {self._given.deadline_s:g} s") from None
        finally:
            if not stays:
                end(self._folder)

    async def start(self) -> None:
        await self._boot(self._given.widths[0])

    async def scale(self) -> None:
        await self._scale(self._there(), self._given.widths)

    async def score(self) -> None:
        session = self._there()
        await session.score(f"at {session.group.width}")

    async def stop(self) -> None:
        end(self._folder)

    async def run(self) -> None:
        first, *others = self._given.widths
        session = await self._boot(first)
        await self._scale(session, others)
        if self._given.engine == OURS:
            await session.facts()

    async def _scale(self, session: Session, widths: list[int]) -> None:
        for width in widths:
            if not await session.scale(width):
                raise SystemExit("the group did not scale: see measured.json")

    async def rounds(self) -> None:
        session = await self._up()
        left_s = self._deadline_s - time.monotonic()
        await rounds(session, self._given.widths, self._given.rounds, self._given.prompts, left_s)

    async def faults(self) -> None:
        """Each with a group of the first width that grows to the last; anew if a fault broke it.
        With --lower one rank less each time: those who left for it are the next joiners."""
        given = self._given
        for turn, fault in enumerate(given.fault or FAULTS[given.engine]):
            less = turn if given.lower else 0
            session = await self._at(given.widths[0] - less)
            width, watched = given.widths[-1] - less, (given.watch_s, given.fault_after_s)
            if await inject(session, fault, width, *watched, lower=given.lower):
                await session.score(f"after {fault}")
            else:
                end(self._folder)

    async def ramp(self) -> None:
        """The large group first, since a group that leaves its ranks behind grows faster."""
        small, large = self._given.widths[0], self._given.widths[-1]
        modes = self._given.mode or _MODES[self._given.engine]
        rate = await self._rate(small)
        for mode in sorted(modes, key=list(_ORDER).index):
            session = await self._at(large if mode is Mode.LARGE else small)
            if mode is Mode.SCALED:
                await session.prepare(large)
            change = self._change(mode, session, large)
            await ramp(session, mode, self._given.trace_s, rate, change)

    def _change(self, mode: Mode, session: Session, large: int) -> Change:
        async def boot_again() -> float:
            began_s = time.monotonic()
            await self._start(large)
            return time.monotonic() - began_s

        if mode is Mode.SCALED:
            return scaled_to(session, large)
        return restarted_with(session, large, boot_again) if mode is Mode.RESTARTED else no_change

    async def _rate(self, small: int) -> float:
        """As given, or as an earlier command of either engine found it, or as it is found now."""
        if self._given.rate:
            return float(self._given.rate)
        path = self._folder.parent / "rate"
        if not path.exists():
            session = await self._at(small)
            path.write_text(str(await calibrated_rate(session, _CALIBRATED_S, _SHARE)))
        return float(path.read_text())

    def _there(self) -> Session:
        """The group of this command, or that of the last."""
        if self._session is None:
            self._session = self._session_of(Group.load(self._folder))
        return self._session

    def _session_of(self, group: Group) -> Session:
        return Session.of(group, self._limits, self._load, self._imaging)

    async def _up(self) -> Session:
        """The group that is there, or a new one; large where leavers come back, for its joiners."""
        if lives(self._folder):
            return self._there()
        end(self._folder)
        widths = self._given.widths
        usual = max(widths) if self._given.leavers in (KEPT, PARKED) else widths[0]
        return await self._boot(self._given.boot or max(2, usual))

    async def _at(self, width: int) -> Session:
        """With `width` ranks; leavers are seen off."""
        session = await self._up()
        before = session.group.width
        if before != width:
            await session.prepare(width)
            found = await session.resize(width)
            session.measured.add("brought to", **found)
            if not found["ok"]:
                raise SystemExit(f"the group did not come to {width} ranks: see measured.json")
            await session.see_off(range(width, before))
        return session

    async def _boot(self, width: int) -> Session:
        session = await self._start(width)
        await session.score(f"started at {width}")
        return session

    async def _start(self, width: int) -> Session:
        given = self._given
        widths = [width, *given.widths]
        setup = Setup(
            given.engine, given.layers, given.gpus, max(given.max_ranks, *widths),
            given.port, given.rpc_port, given.flags, given.floor or min(widths), given.leavers,
            dict(word.split("=", 1) for word in given.setting),
        )  # fmt: skip
        namespace = self._imaging.namespace if self._imaging is not None else None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._session = self._session_of(Group(setup, self._folder, width, namespace=namespace))
        await boot(self._session, given.start_timeout_s)
        return self._session


_Command = Callable[[Commands], Awaitable[None]]
_KEEPS: dict[str, _Command] = {
    "start": Commands.start,
    "scale": Commands.scale,
    "score": Commands.score,
    "stop": Commands.stop,
}
_ENDS: dict[str, _Command] = {
    "run": Commands.run,
    "rounds": Commands.rounds,
    "faults": Commands.faults,
    "ramp": Commands.ramp,
}
_ORDER = (Mode.LARGE, Mode.SMALL, Mode.SCALED, Mode.RESTARTED)
