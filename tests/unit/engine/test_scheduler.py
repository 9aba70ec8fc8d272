"""The scheduler alone: any requests, any cache size, every sequence ends with its own tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_elastic.engine.base import Finish, Output, Request
from dynamo_elastic.engine.reference.kv import SCRATCH_BLOCK, blocks_for
from dynamo_elastic.engine.reference.model import TileSize
from dynamo_elastic.engine.reference.scheduler import Batch, Scheduler, least_blocks
from dynamo_elastic.errors import EngineError

TILE = TileSize(batch_tokens=4, max_context=64)
VOCABULARY = 100


def scheduler(kv_blocks: int = 16) -> Scheduler:
    return Scheduler(TILE, kv_blocks, VOCABULARY)


def request(name: str, prompt: int, max_tokens: int) -> Request:
    return Request(name, tuple(range(1, 1 + prompt)), max_tokens)


def law(tokens: list[int]) -> int:
    """What comes after `tokens`, in place of a model."""
    return (sum(tokens) * 7 + len(tokens)) % VOCABULARY


def step(under_test: Scheduler) -> list[Output]:
    batch = under_test.plan()
    check_batch(batch)
    sampled = [law(c.sequence.tokens) if c.samples else None for c in batch.chunks]
    return under_test.commit(batch, sampled)


def expected(given: Request) -> list[int]:
    tokens = list(given.prompt)
    while len(tokens) < len(given.prompt) + given.max_tokens:
        tokens.append(law(tokens))
    return tokens[len(given.prompt) :]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=9),
    spare=st.integers(0, 6),
    cancelled=st.sets(st.integers(0, 8)),
)
def test_every_sequence_ends_right(
    sizes: list[tuple[int, int]], spare: int, cancelled: set[int]
) -> None:
    under_test = scheduler(least_blocks(TILE) + spare)
    requests = {str(i): request(str(i), p, m) for i, (p, m) in enumerate(sizes)}
    for one in requests.values():
        under_test.submit(one)
    told: dict[str, list[int]] = {name: [] for name in requests}
    ended: dict[str, Finish] = {}
    for number in range(2000):
        if number == 5:
            for i in cancelled & set(range(len(sizes))):
                for output in under_test.cancel(str(i)):
                    ended[output.request_id] = Finish.CANCELLED
        if not under_test.busy:
            break
        for output in step(under_test):
            told[output.request_id] += output.tokens
            if output.finish:
                ended[output.request_id] = output.finish
    assert set(ended) == set(requests)
    assert under_test.kv_blocks_used == 0
    for name, one in requests.items():
        if ended[name] is Finish.LENGTH:
            assert told[name] == expected(one)


def check_batch(batch: Batch) -> None:
    """Rows fit the tile, decodes first, and no two sequences share a block."""
    assert 0 < len(batch.rows) <= TILE.batch_tokens
    owners = [(b, id(c.sequence)) for c in batch.chunks for b in c.sequence.blocks]
    assert len({b for b, _ in owners}) == len(owners)
    assert SCRATCH_BLOCK not in {b for b, _ in owners}
    decodes = [c.sequence.uncomputed == 1 for c in batch.chunks]
    assert decodes == sorted(decodes, reverse=True)
    for chunk in batch.chunks:
        assert len(chunk.sequence.blocks) == blocks_for(chunk.sequence.computed + chunk.count)


def test_a_step_that_went_wrong_is_planned_again() -> None:
    under_test = scheduler()
    under_test.submit(request("a", 6, 3))
    first = under_test.plan()
    again = under_test.plan()
    assert again.rows == first.rows
    assert len(first.rows) == TILE.batch_tokens


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Request("r", (), 1), "prompt is empty"),
        (Request("r", (1,), 0), "max_tokens is 0"),
        (Request("r", (1,) * 60, 5), "above max_context 64"),
        (Request("r", (1, VOCABULARY), 5), "vocabulary"),
        (Request("r", (1,), 5, temperature=-1.0), "temperature"),
    ],
)
def test_what_can_never_run_is_refused(wrong: Request, says: str) -> None:
    under_test = scheduler()
    with pytest.raises(EngineError, match=says):
        under_test.submit(wrong)
    assert not under_test.busy


def test_end_spares_those_that_are_nearly_done() -> None:
    under_test = scheduler()
    under_test.submit(request("short", 1, 2))
    under_test.submit(request("long", 1, 20))
    moved = under_test.end(Finish.MOVED, longer_than=2)
    assert [o.request_id for o in moved] == ["long"]
    assert under_test.busy
