"""How a run comes to failpoints that a resize alone does not pass."""

from __future__ import annotations

from typing import NamedTuple

from dynamo_elastic.failpoints import Act
from dynamo_elastic.testing.chaos.scenario import AtFailpoint, Occasion, Resize


class Detour(NamedTuple):
    """`via` leads `process` ('': a coordinator, an agent, an engine that has no identity yet) to
    `places`."""

    via: AtFailpoint | Occasion
    process: str
    places: tuple[str, ...]


_PARTED = AtFailpoint("worker.decided", "slot1", Act.STOP, 9.0)
"""One that must switch with the others does not hear of the decision."""
_RANK_LOST = AtFailpoint("engine.after_open", "slot1", Act.KILL)
_SHELL_LOST = AtFailpoint("worker.connect.begin", "slot1", Act.KILL)
_NO_IMAGE = AtFailpoint("restore.compare", "", Act.ERROR)

DETOURS: dict[Resize, tuple[Detour, ...]] = {
    Resize.UP: (
        Detour(
            AtFailpoint("scale.before_check", "", Act.KILL),
            "",
            ("coordinator.elected", "scale.before_recover", "scale.before_abort"),
        ),
        Detour(
            AtFailpoint("worker.check.begin", "slot2", Act.ERROR), "", ("scale.abort.commanded",)
        ),
        Detour(
            AtFailpoint("worker.check.begin", "slot2", Act.ERROR),
            "slot0",
            ("worker.abort.begin", "worker.abort.end", "engine.abort_epoch"),
        ),
        Detour(AtFailpoint("agent.before_start", "", Act.KILL), "", ("agent.before_adopt",)),
        Detour(_SHELL_LOST, "slot1", ("worker.resumes", "engine.readmit")),
        Detour(_NO_IMAGE, "", ("engine.warm", "memory.before_discard")),
        Detour(Occasion.TARGET_REFUSED, "", ("coordinator.before_answer",)),
        Detour(Occasion.CLIENT_LEAVES, "slot0", ("engine.cancel",)),
        Detour(Occasion.INSTANCE_DROPPED, "slot1", ("registration.before_repair",)),
    ),
    Resize.DOWN: (
        Detour(
            AtFailpoint("scale.before_redistribute", "", Act.KILL),
            "",
            ("coordinator.elected", "scale.before_recover", "scale.before_abort"),
        ),
        Detour(
            _RANK_LOST, "slot0", ("worker.load.begin", "worker.load.end", "engine.load_weights")
        ),
        Detour(_RANK_LOST, "", ("scale.load.commanded",)),
        Detour(_RANK_LOST, "slot1", ("worker.evicted",)),
        Detour(
            AtFailpoint("agent.before_detach", "", Act.ERROR),
            "",
            ("agent.before_end", "agent.engine_ended"),
        ),
        Detour(_PARTED, "", ("scale.before_withdraw", "scale.withdraw.commanded")),
        Detour(_PARTED, "slot0", ("worker.withdraw.begin", "worker.withdraw.end")),
    ),
}
"""A coordinator, an agent or a shell that takes over; an abort; a decision that is withdrawn; an
engine that is not parked, or has to be booted; a rank that is lost, and experts with it."""
