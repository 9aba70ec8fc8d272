"""One operation in a terminal: phases and ranks over time, readable without colours as well."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynamo_elastic.phases import Phase
from dynamo_elastic.report.chart import COLOURS, pause_of, pause_text, shown_parts
from dynamo_elastic.report.story import Role, StepOutcome, Story
from dynamo_elastic.report.words import rate, seconds, size

LETTERS: dict[str, str] = {
    Phase.PLAN: "p",
    Phase.RESTORE: "r",
    Phase.CONNECT: "c",
    Phase.STREAM: "s",
    Phase.CHECK: "k",
    Phase.DRAIN: "d",
    Phase.REDISTRIBUTE: "e",
    Phase.COMMIT: "!",
    Phase.CANARY: "n",
    Phase.SERVE: "v",
    Phase.REBALANCE: "b",
    Phase.DISCONNECT: "x",
    Phase.PARK: "z",
    Phase.ABORTING: "a",
}
_LEVELS = " ▁▂▃▄▅▆▇█"
_LABEL = 24
_MIN_WIDTH = 30


class _Line:
    """`width` cells of time; later marks cover earlier ones."""

    def __init__(self, story: Story, width: int) -> None:
        self._from_s = story.opened_at_s
        self._span_s = max(story.elapsed_s, 1e-6)
        self._cells: list[tuple[str, str]] = [(" ", "")] * width

    def mark(self, from_s: float, until_s: float, letter: str, style: str) -> None:
        width = len(self._cells)
        first = int((from_s - self._from_s) / self._span_s * width)
        last = max(first + 1, round((until_s - self._from_s) / self._span_s * width))
        for k in range(max(0, min(first, width - 1)), min(last, width)):
            self._cells[k] = (letter, style)

    def text(self) -> Text:
        return Text.assemble(*self._cells)


def gantt(story: Story, width: int) -> RenderableType:
    """The whole story for a terminal of `width` characters."""
    cells = max(_MIN_WIDTH, width - _LABEL - 2)
    parts: list[RenderableType] = [
        _head(story),
        Text(),
        _rows(story, cells),
        Text(),
        _phases(story),
    ]
    for more in (_links(story), _joiners(story), _troubles(story)):
        if more is not None:
            parts += [Text(), more]
    return Group(*parts)


def _head(story: Story) -> Text:
    style = {Phase.DONE: "bold green", Phase.ABORTED: "bold red"}.get(Phase(story.phase), "bold")
    text = Text.assemble(
        (story.title, "bold"), ": ", (story.phase, style), f" in {seconds(story.elapsed_s)}"
    )
    text.append(f"\n{story.operation_id}, epoch {story.epoch}, asked by {story.source}", "dim")
    if pause_of(story) is not None:
        text.append(f"\n{pause_text(story)}", "bold red")
    if story.failure:
        text.append(f"\n{story.failure}", "red")
    return text


def _rows(story: Story, cells: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_LABEL)
    table.add_column(no_wrap=True)
    operation = _Line(story, cells)
    for span in story.phases:
        took_s = story.ended_at_s - span.began_at_s if span.elapsed_s is None else span.elapsed_s
        operation.mark(
            span.began_at_s, span.began_at_s + took_s, *_look(span.phase, failed=span.failed)
        )
    table.add_row(Text("operation", "bold"), operation.text())
    for part in shown_parts(story):
        line = _Line(story, cells)
        for step in story.steps:
            if step.worker == part.worker:
                failed = step.outcome is not StepOutcome.DONE
                until_s = step.began_at_s + step.elapsed_s
                line.mark(step.began_at_s, until_s, *_look(step.phase, failed=failed))
        rank = f"rank {part.rank} " if part.rank is not None else ""
        role = "" if part.role is Role.RETAINED else f" {part.role}"
        table.add_row(f"{rank}{part.worker}{role}", line.text())
    pause = pause_of(story)
    if pause is not None:
        line = _Line(story, cells)
        line.mark(pause.from_s, pause.until_s, "▲", "bold red")
        table.add_row(Text("pause", "bold red"), line.text())
    if story.traffic:
        table.add_row(*_sparkline(story, cells))
    table.add_row("", Text(f"0{seconds(story.elapsed_s):>{cells - 1}}", "dim"))
    return table


def _look(phase: str, *, failed: bool) -> tuple[str, str]:
    if failed:
        return "✕", "bold white on red"
    colour = COLOURS.get(phase, "#888888")
    dark = sum(int(colour[k : k + 2], 16) for k in (1, 3, 5)) < 3 * 128
    return LETTERS.get(phase, "?"), f"{'white' if dark else 'black'} on {colour}"


def _sparkline(story: Story, cells: int) -> tuple[str, Text]:
    width_s, bins = story.bins
    sums = [0.0] * cells
    cell_s = max(story.elapsed_s, 1e-6) / cells
    for one in bins:
        first = (one.began_at_s - story.opened_at_s) / cell_s
        for at in range(max(0, int(first)), min(cells, int(first + width_s / cell_s) + 1)):
            sums[at] = max(sums[at], one.tokens / width_s)
    most = max(sums) or 1.0
    marks = "".join(_LEVELS[round(s / most * (len(_LEVELS) - 1))] for s in sums)
    return f"tokens/s (up to {most:.0f})", Text(marks, "blue")


def _phases(story: Story) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("", "left"), ("phase", "left"), ("began", "right"), ("took", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("")
    for span in story.phases:
        letter, style = _look(span.phase, failed=False)
        took = "under way" if span.elapsed_s is None else seconds(span.elapsed_s)
        began = seconds(span.began_at_s - story.opened_at_s)
        failed = Text("failed", "bold red") if span.failed else Text()
        table.add_row(Text(letter, style), span.phase, began, took, failed)
    return table


def _links(story: Story) -> Table | None:
    if not story.links:
        return None
    table = Table(box=None, pad_edge=False)
    for name in ("bytes", "from", "to", "step", "rate"):
        table.add_column(name, justify="right" if name in ("bytes", "rate") else "left")
    for link in sorted(story.links, key=lambda link: -link.size_bytes)[:20]:
        speed = rate(link.size_bytes, link.elapsed_s)
        table.add_row(size(link.size_bytes), link.source, link.target, link.step, speed)
    return table


def _joiners(story: Story) -> Text | None:
    if not story.joiners:
        return None
    lines = []
    for joiner in story.joiners:
        why = f" (not from {'; '.join(joiner.fell_through)})" if joiner.fell_through else ""
        lines.append(f"{joiner.worker} from {joiner.tier} in {seconds(joiner.ready_s)}{why}")
    return Text("\n".join(lines))


def _troubles(story: Story) -> Text | None:
    lines = [
        f"{s.worker}, {s.step}: {s.outcome}{': ' if s.reason else ''}{s.reason}"
        for s in story.troubles[:20]
    ]
    lines += [f"lost: {worker}" for worker in story.lost]
    return Text("\n".join(lines), "red") if lines else None
