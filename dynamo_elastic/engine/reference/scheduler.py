"""Which rows the next step computes: continuous batching over a paged KV cache.

A sequence computes the positions that have no keys yet: one when it decodes, many after admission.
Its state changes only in commit(), so a step that went wrong is planned and run again as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from dynamo_elastic.engine.base import Finish, Output, Request
from dynamo_elastic.engine.reference.kv import BlockPool, blocks_for
from dynamo_elastic.engine.reference.model import Row, TileSize
from dynamo_elastic.errors import EngineError


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation under way."""

    request: Request
    tokens: list[int]
    """Prompt, then what was generated."""
    computed: int = 0
    """Positions whose keys are in the cache."""
    blocks: list[int] = field(default_factory=list)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def to_go(self) -> int:
        return self.request.max_tokens - self.generated

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `first` to `first + count - 1` of a batch: the next `count` positions of `sequence`."""

    sequence: Sequence
    first: int
    count: int

    @property
    def samples(self) -> bool:
        """True if the last row of the chunk yields a token."""
        return self.count == self.sequence.uncomputed


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step; decodes come first."""

    rows: list[Row]
    chunks: list[Chunk]


class Scheduler:
    """The sequences of one rank. Used by one thread."""

    def __init__(self, tile: TileSize, kv_blocks: int, vocab_size: int) -> None:
        self._tile = tile
        self._vocab_size = vocab_size
        self._pool = BlockPool(kv_blocks)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        """Oldest first: the youngest gives way when blocks run out."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def kv_blocks_used(self) -> int:
        return self._pool.total - self._pool.free

    @property
    def kv_blocks_total(self) -> int:
        return self._pool.total

    def submit(self, request: Request) -> None:
        """Queue `request`. Raises EngineError, naming field and limit, if it can never run."""
        fault = self._fault(request)
        if fault:
            raise EngineError(f"request {request.request_id}: {fault}")
        self._waiting.append(Sequence(request, list(request.prompt)))

    def _fault(self, request: Request) -> str:
        if not request.prompt:
            return "prompt is empty; give at least one token"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}; ask for at least 1"
        if request.temperature < 0:
            return f"temperature is {request.temperature}; 0 is the lowest"
        length = len(request.prompt) + request.max_tokens
        if length > self._tile.max_context:
            return (
                f"prompt ({len(request.prompt)}) + max_tokens ({request.max_tokens}) = {length} "
                f"is above max_context {self._tile.max_context}"
            )
        if not all(0 <= t < self._vocab_size for t in request.prompt):
            return f"prompt holds a token outside the vocabulary of {self._vocab_size}"
        if any(s.request.request_id == request.request_id for s in self._sequences()):
            return "request_id is in use"
        return ""

    def plan(self) -> Batch:
        """The rows of the next step, and their blocks. Empty if there is nothing to do."""
        self._admit()
        decodes = [s for s in self._running if s.uncomputed == 1]
        prefills = [s for s in self._running if s.uncomputed > 1]
        batch = Batch([], [])
        for sequence in (*decodes, *prefills):
            count = min(sequence.uncomputed, self._tile.batch_tokens - len(batch.rows))
            if count and sequence in self._running and self._reserve(sequence, count, batch):
                _append(batch, sequence, count)
        return batch

    def _admit(self) -> None:
        """Let waiting sequences run, in order; each running one is sure of a row in every step."""
        while self._waiting and len(self._running) < self._tile.batch_tokens:
            if blocks_for(len(self._waiting[0].tokens)) > self._pool.free:
                return
            self._running.append(self._waiting.popleft())

    def _reserve(self, sequence: Sequence, count: int, batch: Batch) -> bool:
        """Give `sequence` blocks for `count` more positions; False if it had to give way itself."""
        while len(sequence.blocks) < blocks_for(sequence.computed + count):
            if self._pool.free:
                sequence.blocks.append(self._pool.take())
                continue
            planned = [c.sequence for c in batch.chunks]
            youngest = next(s for s in reversed(self._running) if s not in planned)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its keys are computed again later."""
        self._running.remove(sequence)
        self._pool.give_back(sequence.blocks)
        sequence.computed = 0
        self._waiting.appendleft(sequence)

    def commit(self, batch: Batch, sampled: Seq[int | None]) -> list[Output]:
        """Take in a step that went right; `sampled[i]` is the token that chunk i yielded."""
        outputs = []
        for chunk, token in zip(batch.chunks, sampled, strict=True):
            sequence = chunk.sequence
            sequence.computed += chunk.count
            if token is None:
                continue
            sequence.tokens.append(token)
            finish = _finish(sequence, token)
            outputs.append(Output(sequence.request.request_id, (token,), finish))
            if finish:
                self._remove(sequence)
        return outputs

    def end(self, finish: Finish, reason: str = "", *, longer_than: int = 0) -> list[Output]:
        """End every sequence with more than `longer_than` tokens to go."""
        doomed = [s for s in self._sequences() if s.to_go > longer_than]
        for sequence in doomed:
            self._remove(sequence)
        return [Output(s.request.request_id, (), finish, reason) for s in doomed]

    def cancel(self, request_id: str) -> list[Output]:
        """End one sequence as CANCELLED; nothing if it is unknown."""
        for sequence in self._sequences():
            if sequence.request.request_id == request_id:
                self._remove(sequence)
                return [Output(request_id, (), Finish.CANCELLED)]
        return []

    def _sequences(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._pool.give_back(sequence.blocks)


def _append(batch: Batch, sequence: Sequence, count: int) -> None:
    batch.chunks.append(Chunk(sequence, len(batch.rows), count))
    for position in range(sequence.computed, sequence.computed + count):
        batch.rows.append(Row(sequence.tokens[position], position, sequence.blocks))


def _finish(sequence: Sequence, token: int) -> Finish | None:
    if token in sequence.request.stop_tokens:
        return Finish.STOP
    return Finish.LENGTH if sequence.to_go == 0 else None


def least_blocks(tile: TileSize) -> int:
    """The KV blocks with which one sequence of any legal length runs to its end."""
    return blocks_for(tile.max_context)
