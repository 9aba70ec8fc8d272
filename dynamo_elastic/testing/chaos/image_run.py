"""One run on images: the work with a fault in it, tidying, and the work again; and the verdict."""

from __future__ import annotations

import signal
import time

from dynamo_elastic.failpoints import Act
from dynamo_elastic.testing.chaos.faults import undo
from dynamo_elastic.testing.chaos.history import History
from dynamo_elastic.testing.chaos.image_scenario import ImageScenario, Work
from dynamo_elastic.testing.chaos.image_shop import ImageShop, ShopError
from dynamo_elastic.testing.chaos.run import (
    Hang,
    judged,
    settled,
    stream_ends,
    take_in,
)
from dynamo_elastic.testing.chaos.verdict import Verdict
from dynamo_elastic.testing.chaos.world import World

_BY_CLIENTS = "beside a deployment that serves"


async def run_on_images(
    world: World, shop: ImageShop, scenario: ImageScenario
) -> tuple[Verdict, History]:
    """Play `scenario`. The shop is open."""
    fault = scenario.fault
    verdict = Verdict(
        scenario.number,
        str(scenario),
        _BY_CLIENTS,
        fault.place,
        fault.process,
        fault.act,
        fired=False,
    )
    history = world.history()
    try:
        verdict.violations += await _play(world, shop, scenario, verdict)
    except Hang as exc:
        verdict.hang = str(exc)
    except ShopError as exc:
        verdict.violations.append(f"work without a fault fails: {exc}")
    await undo(world)
    take_in(history, world)
    return judged(verdict, history), history


async def _play(
    world: World, shop: ImageShop, scenario: ImageScenario, verdict: Verdict
) -> list[str]:
    """What did not hold."""
    work, fault = scenario.work, scenario.fault
    before = await _living(world)
    await shop.prepare(work)
    images = set(shop.images())
    traces = {t for t in shop.traces() if not t.startswith("part ")}
    world.arm(fault.file, fault.content)
    began_s = time.monotonic()
    code, said = await shop.do(work)
    verdict.fired = not world.armed(fault.file)
    world.disarm()
    found = [_wrong_end(fault.act, code, said)] if verdict.fired else []
    await shop.tidy()
    found += [f"is left: {trace}" for trace in await shop.leftovers(traces)]
    found += [f"is not whole: {damage}" for damage in shop.damage()]
    found += [f"is gone: {i}" for i in _missing(work, images, set(shop.images()))]
    if code:
        found += await _again(shop, work, traces)
    verdict.seconds = round(time.monotonic() - began_s, 3)
    shop.sweep(images)
    await stream_ends(world)
    if (after := await _living(world)) != before:
        found.append(f"engines were disturbed: {before}, then {after}")
    return [line for line in found if line]


async def _again(shop: ImageShop, work: Work, traces: set[str]) -> list[str]:
    """Done again it succeeds, and leaves nothing."""
    if shop.done(work):
        return []
    code, said = await shop.do(work)
    found = [f"fails when it is done again: {code}: {said[-800:]}"] if code else []
    if work is Work.EXPORT:
        await shop.tidy()
    elif not shop.done(work) and work is not Work.TAKE:
        found.append("is not done when it is done again")
    found += [f"is left of it: {trace}" for trace in await shop.leftovers(traces)]
    return [*found, *(f"is not whole: {damage}" for damage in shop.damage())]


def _wrong_end(act: Act, code: int, said: str) -> str:
    """How the command must not end after `act`; '' if it ended as it should."""
    right = {
        Act.KILL: code == -signal.SIGKILL,
        Act.ERROR: code > 0,
        Act.STOP: code == 0,
        Act.DELAY: code == 0,
    }
    traced = "Traceback" in said
    return "" if right[act] and not traced else f"after {act} it ends with {code}: {said[-800:]}"


def _missing(work: Work, before: set[str], after: set[str]) -> set[str]:
    gone = before - after
    return set() if work is Work.REMOVE and len(gone) < 2 else gone


async def _living(world: World) -> tuple[object, ...]:
    """The topology in force, and every engine that lives."""
    status = await settled(world)
    epoch = status.in_force.epoch if status.in_force is not None else 0
    return (epoch, *((s.slot, s.state, s.pid, s.incarnation) for s in await world.slots()))
