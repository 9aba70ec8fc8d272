from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from dynamo_elastic.errors import RebindRefused

BUFFER = "dynamo_elastic.engine.vllm.v0_33.buffer"
MOVES = "dynamo_elastic.engine.vllm.v0_33.expert_moves"


class Graphs:
    """Those of a worker, as read at some time."""

    facts: ClassVar[dict[str, Any]] = {"graphs": 3}

    def __init__(self) -> None:
        self.refuses = False
        self.rebound = 0

    def rebind(self) -> dict[str, Any]:
        if self.refuses:
            raise RebindRefused("another kernel")
        self.rebound += 1
        return {}


class Worker:
    """Counts how often its graphs are read."""

    model_config = SimpleNamespace(enable_cumem_allocator=False)
    model_runner = SimpleNamespace(eplb_state=SimpleNamespace(model_states={}))

    def __init__(self) -> None:
        self.read: list[Graphs] = []

    def rebinding(self) -> Graphs:
        self.read.append(Graphs())
        return self.read[-1]


@pytest.fixture
def leaver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Leaver without vLLM and without a GPU."""
    buffer: Any = ModuleType(BUFFER)
    buffer.destroy = lambda: None
    moves: Any = ModuleType(MOVES)
    moves.StagedMoves = type("StagedMoves", (), {})
    monkeypatch.setitem(sys.modules, BUFFER, buffer)
    monkeypatch.setitem(sys.modules, MOVES, moves)
    monkeypatch.delitem(sys.modules, "dynamo_elastic.engine.vllm.v0_33.leaver", raising=False)
    from dynamo_elastic.engine.vllm.v0_33 import leaver as module

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(module, "used_bytes", lambda: 0)
    yield module.Leaver(Worker(), rebinds=True)
    sys.modules.pop("dynamo_elastic.engine.vllm.v0_33.leaver", None)


def test_graphs_are_read_once_for_all_lives(leaver: Any) -> None:
    worker: Worker = leaver._worker
    for _ in range(3):
        assert leaver.let_go([])["graphs"] == 3
        assert leaver.rebind()
    (only,) = worker.read
    assert only.rebound == 3


def test_graphs_that_were_captured_again_are_read_again(leaver: Any) -> None:
    worker: Worker = leaver._worker
    leaver.let_go([])
    worker.read[0].refuses = True
    assert not leaver.rebind()
    leaver.let_go([])
    assert leaver.rebind()
    assert [graphs.rebound for graphs in worker.read] == [0, 1]


def test_an_attempt_that_ends_before_the_rebind_costs_nothing(leaver: Any) -> None:
    worker: Worker = leaver._worker
    leaver.let_go([])
    leaver.let_go([])
    assert leaver.rebind()
    assert len(worker.read) == 1
