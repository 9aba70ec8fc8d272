"""Stories for tests of reports: an operation that grew 2 ranks to 4, and one that was undone."""

from __future__ import annotations

from dataclasses import replace

from dynamo_elastic.phases import Kind, Phase, Step, phases_of
from dynamo_elastic.report.story import Part, PhaseSpan, Role, StepOutcome, StepSpan, Story
from dynamo_elastic.report.traffic import BIN_S, Gap, WorkerTraffic

OPENED_AT_S = 1_800_000_000.0
_PHASE_S = (0.02, 0.61, 0.14, 0.22, 0.09, 0.13, 0.08, 0.11, 0.3)
_STEPS: dict[str, tuple[tuple[Step, tuple[int, ...]], ...]] = {
    Phase.PLAN: ((Step.FREEZE, (0, 1)),),
    Phase.RESTORE: ((Step.RESTORE, (2, 3)),),
    Phase.CONNECT: ((Step.CONNECT, (0, 1, 2, 3)),),
    Phase.STREAM: ((Step.STREAM, (0, 1)),),
    Phase.CHECK: ((Step.CHECK, (0, 2, 3)),),
    Phase.COMMIT: ((Step.SWITCH, (0, 1, 2, 3)),),
    Phase.CANARY: ((Step.CANARY, (0, 2, 3)),),
    Phase.SERVE: ((Step.SERVE, (2, 3)),),
    Phase.REBALANCE: ((Step.PUSH_EXPERTS, (0, 1)),),
}


def grown(*, gap_s: float = 0.084) -> Story:
    """2 -> 4 ranks in 1.7 s; a stream on slot1 waited `gap_s` at the switch."""
    phases: list[PhaseSpan] = []
    steps: list[StepSpan] = []
    at_s = OPENED_AT_S
    for phase, took_s in zip(phases_of(Kind.UP), _PHASE_S, strict=True):
        phases.append(PhaseSpan(phase, at_s, took_s))
        for step, slots in _STEPS[phase]:
            steps += [_step(phase, step, slot, at_s, took_s) for slot in slots]
        at_s += took_s
    commit = next(p for p in phases if p.phase == Phase.COMMIT)
    switched_at_s = commit.began_at_s + 0.9 * (commit.elapsed_s or 0.0)
    return Story(
        deployment="sample",
        operation_id="up-2-5ca1ab1e",
        kind=Kind.UP,
        phase=Phase.DONE,
        epoch=2,
        source="planner",
        request_id="decision-1",
        ranks_before=2,
        ranks_after=4,
        opened_at_s=OPENED_AT_S,
        elapsed_s=at_s - OPENED_AT_S,
        deadline_at_s=OPENED_AT_S + 300,
        parts=tuple(
            Part(f"slot{k}", Role.RETAINED if k < 2 else Role.JOINER, k, "thaw done")
            for k in range(4)
        ),
        phases=tuple(phases),
        steps=tuple(steps),
        traffic=tuple(_traffic(slot, switched_at_s, gap_s) for slot in (0, 1)),
    )


def undone(reason: str = "its weights differ: dense/norm <of layer 3>") -> Story:
    """The same, but slot3 failed its check and all was undone."""
    story = grown()
    until = [p.phase for p in story.phases].index(Phase.CHECK) + 1
    kept = story.phases[:until]
    failed = replace(kept[-1], failed=True)
    undo = PhaseSpan(Phase.ABORTING, failed.began_at_s + (failed.elapsed_s or 0.0), 0.05)
    names = {p.phase for p in kept}
    steps = [
        replace(s, outcome=StepOutcome.FAILED, reason=reason)
        if (s.step, s.worker) == (Step.CHECK, "slot3")
        else s
        for s in story.steps
        if s.phase in names
    ]
    return replace(
        story,
        operation_id="up-2-deadfa11",
        phase=Phase.ABORTED,
        phases=(*kept[:-1], failed, undo),
        steps=tuple(steps),
        elapsed_s=undo.began_at_s + 0.05 - OPENED_AT_S,
        traffic=(),
        failure=f"slot3 failed check: {reason}",
    )


def _step(phase: str, step: Step, slot: int, at_s: float, took_s: float) -> StepSpan:
    facts: dict[str, object] = {}
    if step is Step.RESTORE:
        falls = [] if slot == 2 else ["parked: no engine is parked in this slot"]
        facts = {"tier": "parked" if slot == 2 else "image", "ready_s": 0.9 * took_s}
        facts["fell_through"] = falls
    if step in (Step.STREAM, Step.PUSH_EXPERTS):
        links = {"slot2": 1_200_000 * (slot + 1), "slot3": 900_000}
        facts = {"size_bytes": sum(links.values()), "elapsed_s": 0.8 * took_s, "links": links}
    if step is Step.SWITCH:
        facts = {"switched": True, "gap_s": 0.01 * (slot + 1), "decided_to_first_step_s": 0.05}
    length_s = took_s * (0.95 - 0.1 * (slot % 3))
    return StepSpan(phase, step, f"slot{slot}", at_s, length_s, StepOutcome.DONE, facts=dict(facts))


def _traffic(slot: int, switched_at_s: float, gap_s: float) -> WorkerTraffic:
    first, last = int((OPENED_AT_S - 1) / BIN_S), int((OPENED_AT_S + 2.6) / BIN_S)
    bins = range(first, last)
    quiet = range(int((switched_at_s - gap_s) / BIN_S) + 1, int(switched_at_s / BIN_S))
    tokens = tuple(0 if k in quiet else 6 + k % 3 for k in bins)
    at = int(switched_at_s / BIN_S)
    gaps_s = tuple((gap_s if slot else gap_s / 2) if k == at else 0.012 for k in bins)
    longest = Gap(switched_at_s - gap_s, gap_s if slot else gap_s / 2, f"slot{slot}", f"r{slot}")
    return WorkerTraffic(f"slot{slot}", BIN_S, first, tokens, gaps_s, (longest,))
