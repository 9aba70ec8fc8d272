"""Experts from rank to rank over real NIXL, ranks being threads, through small regions."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.engine.vllm.elastic.experts import Expert, ExpertExchange, Wanted, row_bytes
from dynamo_elastic.errors import TransferError

TIMEOUT_S = 5.0
RANKS = 3


def expert(number: int, filled: bool = True) -> list[Tensor]:
    """Weights of unlike types and layouts, one of them without a byte."""
    made = [
        torch.full((5, 3), float(number), dtype=torch.bfloat16).t(),
        torch.arange(7, dtype=torch.int32) + number,
        torch.full((11,), number % 120, dtype=torch.uint8),
        torch.zeros(0),
    ]
    return made if filled else [torch.zeros_like(tensor) for tensor in made]


def is_expert(weights: Expert, number: int) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights, expert(number), strict=True))


class Table:
    """Where ranks that are threads hear each other."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._barrier = Barrier(size, timeout=timeout_s)
        self._said: list[Any] = [None] * size

    def of(self, rank: int) -> Seat:
        return Seat(self, rank)

    def gather(self, rank: int, said: Any) -> list[Any]:
        try:
            self._said[rank] = said
            self._barrier.wait()
            heard = list(self._said)
            self._barrier.wait()
        except BrokenBarrierError as exc:
            raise RuntimeError("a rank did not come") from exc
        return heard


class Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self._table, self.rank = table, rank

    def gather(self, said: Any) -> list[Any]:
        return self._table.gather(self.rank, said)


def on_each(act: Callable[[ExpertExchange, int], Any], region_bytes: int) -> list[Any]:
    """What `act` returns on each rank."""
    table = Table(RANKS, TIMEOUT_S)

    def one(rank: int) -> Any:
        agent = NixlAgent(f"experts-{rank}-{uuid.uuid4().hex}")
        exchange = ExpertExchange(
            table.of(rank), agent, torch.device("cpu"),
            timeout_s=TIMEOUT_S, region_bytes=region_bytes,
        )  # fmt: skip
        table.gather(rank, None)  # nobody is gone before all have come
        try:
            return act(exchange, rank)
        finally:
            exchange.close()

    with ThreadPoolExecutor(RANKS) as pool:
        return [f.result(3 * TIMEOUT_S) for f in [pool.submit(one, r) for r in range(RANKS)]]


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("seed", range(3))
def test_everyone_gets_what_it_wants_whatever_fits_at_once(rows: int, seed: int) -> None:
    """Twice, for regions are used again."""
    chance = random.Random(seed)
    turns = [
        [[(chance.choice(other(rank)), chance.randrange(20)) for _ in range(chance.randrange(12))]
         for rank in range(RANKS)]
        for _ in range(2)
    ]  # fmt: skip

    def act(exchange: ExpertExchange, rank: int) -> list[bool]:
        right = []
        for turn, wishes in enumerate(turns):
            held = {number: expert(100 * turn + 20 * rank + number) for number in range(20)}
            wanted = [Wanted(s, number, expert(0, filled=False)) for s, number in wishes[rank]]
            exchange.move(held, wanted)
            right += [is_expert(w.into, 100 * turn + 20 * w.source + w.expert) for w in wanted]
        return right

    assert all(all(right) for right in on_each(act, rows * row_bytes(expert(0))))


def other(rank: int) -> list[int]:
    return [r for r in range(RANKS) if r != rank]


def test_nobody_wants_anything() -> None:
    def act(exchange: ExpertExchange, rank: int) -> bool:
        exchange.move({rank: expert(rank)}, [])
        return True

    assert on_each(act, 1 << 12) == [True] * RANKS


def test_an_expert_larger_than_a_region_is_refused() -> None:
    def act(exchange: ExpertExchange, rank: int) -> None:
        with pytest.raises(ValueError, match="expert 7 has 1024 bytes, a region 512"):
            exchange.move({}, [Wanted((rank + 1) % RANKS, 7, [torch.zeros(256)])])

    on_each(act, 512)


def test_a_rank_that_is_gone_is_an_error_on_the_others() -> None:
    """Its regions went with it: they write to nobody."""

    def act(exchange: ExpertExchange, rank: int) -> str:
        if rank == 2:
            exchange.close()
        gone = Wanted(1, 1, expert(0, filled=False))
        try:
            exchange.move({1: expert(1)}, [gone] if rank == 2 else [])
        except (TransferError, RuntimeError) as exc:
            return type(exc).__name__
        return ""

    said = on_each(act, 1 << 12)
    assert said[1] == "TransferError"
    assert set(said) == {"TransferError", "RuntimeError"}  # and the others hear that it has failed
