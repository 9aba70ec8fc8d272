"""A look at a deployment, for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_elastic.agent.base import SlotState, SlotStatus
from dynamo_elastic.cli.look import Picture
from dynamo_elastic.coordinator.records import MemberState
from dynamo_elastic.coordinator.stories import story_of
from dynamo_elastic.coordinator.targets import succession
from dynamo_elastic.phases import TERMINAL, Kind, Phase, phases_of
from dynamo_elastic.report.story import PhaseSpan, Story
from dynamo_elastic.report.words import rate, seconds, size
from dynamo_elastic.topology import EMPTY

_BAR = 30
_STATE_STYLES = {
    MemberState.SERVING: "green",
    MemberState.JOINING: "yellow",
    MemberState.LEAVING: "yellow",
}


def view(picture: Picture) -> RenderableType:
    """All of it, the operation under way last."""
    if picture.status.topology is None:
        parts: list[RenderableType] = [Text("nothing is served")]
    else:
        parts = [*_head(picture), Text(), _ranks(picture), Text(), *_slots(picture)]
    status = picture.status
    for label, record in (("under way", status.operation), ("last", status.last)):
        if record is not None:
            story = story_of(record, picture.deployment, picture.timeout_s, now_s=picture.now_s)
            parts += [Text(), *_operation(label, story, picture)]
    return Group(*parts)


def _head(picture: Picture) -> Iterator[Text]:
    now = picture.status
    in_force = now.in_force or now.topology
    epoch = in_force.epoch if in_force else 0
    leader = now.leader or "nobody"
    yield Text.assemble(
        (picture.deployment, "bold"), f": epoch {epoch}, {now.width} ranks; leader {leader}"
    )
    if now.target is not None:
        yield Text(succession(now.target))
    if now.withdrawn is not None and now.topology is not None:
        yield Text(f"epoch {now.topology.epoch} was withdrawn; it is to be superseded", "yellow")
    if now.queued is not None:
        yield Text(f"next: {now.queued.ranks} ranks, wanted by {now.queued.source}")
    if now.notice:
        yield Text(f"waiting: {now.notice}", "yellow")
    for name, warning in now.warnings.items():
        yield Text(f"warning: {name}: {warning.text}", "yellow")
    for suspect, strike in now.strikes.items():
        yield Text(f"suspect: {suspect} failed {strike.count} times: {strike.reason}", "yellow")


def _ranks(picture: Picture) -> Table:
    now = picture.status
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "worker", "host", "engine", "from", "state", "experts"):
        table.add_column(name)
    tiers = {s.incarnation: s.tier for s in picture.slots or () if s.incarnation}
    lost = now.lost_reasons()
    in_force = now.in_force or now.topology
    for rank, member in enumerate(in_force.members if in_force else ()):
        record = now.members.get(member.worker_id)
        state = Text(record.state, _STATE_STYLES.get(record.state, "")) if record else Text("?")
        if member.worker_id in lost:
            state = Text(f"lost: {lost[member.worker_id]}", "bold red")
        experts = " ".join(str(e) for e in member.experts if e != EMPTY)
        table.add_row(
            str(rank),
            member.worker_id,
            record.host if record else "?",
            member.incarnation,
            tiers.get(member.incarnation, ""),
            state,
            experts,
        )
    return table


def _slots(picture: Picture) -> Iterator[RenderableType]:
    """The free slots of all hosts, and what this host's agent has in its GPU slots."""
    free = picture.status.standby()
    yield Text(f"free slots: {', '.join(free) if free else 'none'}")
    if picture.slots is None:
        yield Text(f"GPU slots of this host: {picture.no_slots}", "dim")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("GPU slot", "holds", "from", "image"):
        table.add_column(name)
    for slot in picture.slots:
        table.add_row(str(slot.slot), _held(slot), slot.tier, slot.image_id or "none")
    yield table
    parked = [s for s in picture.slots if s.state is SlotState.PARKED]
    held = size(sum(s.parked_bytes for s in parked))
    yield Text(f"parked: {len(parked)} engines, {held} of host memory")


def _held(slot: SlotStatus) -> Text:
    if slot.state is SlotState.PARKED:
        since = f"{size(slot.parked_bytes)}, for {slot.parked_s:.0f} s"
        return Text(f"parked engine ({since})", "cyan")
    style = "green" if slot.state is SlotState.SERVING else "yellow"
    return Text(slot.state, "dim" if slot.state is SlotState.FREE else style)


def _operation(label: str, story: Story, picture: Picture) -> Iterator[RenderableType]:
    style = {Phase.DONE: "green", Phase.ABORTED: "bold red"}.get(Phase(story.phase), "bold yellow")
    yield Text.assemble(
        f"{label}: ",
        (story.title, "bold"),
        f" ({story.operation_id}, by {story.source}): ",
        (story.phase, style),
        f" {seconds(story.elapsed_s)}",
    )
    yield _phases(story, picture)
    if story.failure:
        yield Text(f"  failure: {story.failure}", "red")
    if story.lost:
        yield Text(f"  lost: {', '.join(story.lost)}", "red")
    if story.safe_to_release:
        yield Text(f"  safe to release: {', '.join(story.safe_to_release)}")
    if story.phase not in TERMINAL:
        for part in story.parts:
            if part.state:
                yield Text(f"  {part.worker}: {part.state}", "dim")
    elif picture.report is not None:
        yield Text(f"  report: {picture.report}")


def _phases(story: Story, picture: Picture) -> Table:
    """A bar for each phase: of one under way, how many ranks have answered its newest step."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=15)
    for _ in range(3):
        table.add_column()
    spans = {p.phase: p for p in story.phases}
    ahead = [] if story.over else [p for p in phases_of(Kind(story.kind)) if p not in spans]
    for phase in (*spans, *ahead):
        span = spans.get(phase)
        took = "" if span is None else seconds(_elapsed_s(span, picture.now_s))
        table.add_row(f"  {phase}", _bar(span, picture), took, _facts(story, phase, picture))
    return table


def _elapsed_s(span: PhaseSpan, now_s: float) -> float:
    return span.elapsed_s if span.elapsed_s is not None else max(0.0, now_s - span.began_at_s)


def _bar(span: PhaseSpan | None, picture: Picture) -> Text:
    if span is None:
        return Text("─" * _BAR, "dim")
    if span.failed:
        return Text("━" * _BAR, "red")
    if span.elapsed_s is not None:
        return Text("━" * _BAR, "green")
    progress = picture.progress
    share = progress.answered / progress.asked if progress is not None and progress.asked else 0.0
    done = round(share * _BAR)
    return Text.assemble(("━" * done, "yellow"), ("─" * (_BAR - done), "dim"))


def _facts(story: Story, phase: str, picture: Picture) -> str:
    """What is worth knowing of a phase, in a few words."""
    facts = []
    progress = picture.progress
    if not story.over and phase == story.phase and progress is not None:
        facts.append(f"{progress.step}: {progress.answered} of {progress.asked} ranks")
    steps = [s for s in story.steps if s.phase == phase]
    tiers = {str(s.facts["tier"]) for s in steps if "tier" in s.facts}
    if tiers:
        facts.append(f"from {', '.join(sorted(tiers))}")
    pushed = [s for s in steps if s.facts.get("size_bytes")]
    if pushed:
        total_bytes = sum(int(s.facts["size_bytes"]) for s in pushed)
        slowest_s = max(float(s.facts["elapsed_s"]) for s in pushed)
        facts.append(f"{size(total_bytes)}, {rate(total_bytes, slowest_s)}")
    gap_s = max((float(s.facts.get("gap_s", 0.0)) for s in steps), default=0.0)
    if gap_s:
        facts.append(f"pause {seconds(gap_s)}")
    moved = sum(int(s.facts.get("moved", 0)) for s in steps)
    if moved:
        facts.append(f"{moved} requests moved")
    return "; ".join(facts)
