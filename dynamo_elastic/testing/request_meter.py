"""Requests counted by who is to blame: the deployment, or a frontend that a test had killed."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_elastic.demo.load import StreamResult

_SHOWN_ERRORS = 5


@dataclass(slots=True)
class Meter:
    """`reference` is the text of each prompt, from ranks that never scaled.

    Between the kill of a frontend and the moment when its successor lists the model there is no
    frontend. A request that was under way at the kill has lost its connection (`cut_off`), one that
    was sent in between has met nobody who could accept it (`not_accepted`); neither is counted in
    `total`. Everything else is, and must end well: also what was sent right after.
    """

    reference: dict[str, str]
    total: int = 0
    failed: int = 0
    unequal: int = 0
    cut_off: int = 0
    not_accepted: int = 0
    errors: set[str] = field(default_factory=set)
    _away: list[tuple[float, float]] = field(default_factory=list)

    def frontend_was_away(self, since_s: float, until_s: float) -> None:
        """time.monotonic() of the kill, and of when its successor listed the model."""
        self._away.append((since_s, until_s))

    def add(self, results: list[StreamResult]) -> None:
        """Take in streams that have ended."""
        for result in results:
            if result.error and self._was_under_way_at_a_kill(result):
                self.cut_off += 1
            elif result.error and self._had_no_frontend(result):
                self.not_accepted += 1
            else:
                self._count(result)

    def _count(self, result: StreamResult) -> None:
        self.total += 1
        if result.error:
            self.failed += 1
            self.errors = set(sorted(self.errors | {result.error})[:_SHOWN_ERRORS])
        elif result.text != self.reference[result.prompt.key]:
            self.unequal += 1

    def _was_under_way_at_a_kill(self, result: StreamResult) -> bool:
        return any(result.started_s <= at_s <= result.ended_s for at_s, _ in self._away)

    def _had_no_frontend(self, result: StreamResult) -> bool:
        return any(since_s <= result.started_s <= until_s for since_s, until_s in self._away)
