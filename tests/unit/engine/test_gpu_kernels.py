"""Kernels that were chosen by their time: the choice is the same on all ranks of a group."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynamo_elastic.comm.host_group import HostExpertGroup
from dynamo_elastic.engine.base import KERNELS_VARIABLE, EngineState
from dynamo_elastic.engine.reference.epochs import Epochs
from dynamo_elastic.engine.reference.gpu_kernels import (
    DOWN,
    GATE_UP,
    PLAIN,
    Choices,
    Order,
    agreed,
    check,
    fastest,
    product,
)
from dynamo_elastic.errors import ElasticError, EngineError, PeerLost
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, Rank, WorkerId

TURNED = {**PLAIN, DOWN: Order.WEIGHTS}
FIRST, SECOND = WorkerId("slot0"), WorkerId("slot1")


@pytest.mark.parametrize("order", Order)
def test_every_order_gives_the_same_product(order: Order) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 5, 8, generator=generator)
    weights = torch.randn(3, 4, 8, generator=generator)
    expected = torch.einsum("enk,emk->enm", rows, weights)
    torch.testing.assert_close(product(order, rows, weights), expected)
    # As in a buffer: with a gap behind each row.
    out = torch.full((3, 5, 6), 7.0)
    product(order, rows, weights, out=out[..., :4])
    torch.testing.assert_close(out[..., :4], expected)
    assert (out[..., 4:] == 7).all()


def test_another_order_must_be_clearly_faster() -> None:
    seconds = {
        (GATE_UP, Order.ROWS): 1.0,
        (GATE_UP, Order.WEIGHTS): 0.99,
        (DOWN, Order.ROWS): 1.0,
        (DOWN, Order.WEIGHTS): 0.5,
    }
    assert fastest(lambda name, order: seconds[name, Order(order)]) == TURNED


def test_engines_of_one_kind_choose_once(tmp_path: Path) -> None:
    here = {KERNELS_VARIABLE: str(tmp_path)}
    assert agreed(lambda: TURNED, {}) == TURNED
    assert not list(tmp_path.iterdir())
    assert agreed(lambda: TURNED, here) == TURNED
    assert agreed(lambda: pytest.fail("it was chosen before"), here) == TURNED


def test_of_two_that_choose_at_once_the_first_counts(tmp_path: Path) -> None:
    here = {KERNELS_VARIABLE: str(tmp_path)}

    def slow() -> Choices:
        agreed(lambda: TURNED, here)
        return PLAIN

    assert agreed(slow, here) == TURNED
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"experts.down": "rows"}'])
def test_choices_that_can_not_be_used_are_made_anew(tmp_path: Path, content: str) -> None:
    here = {KERNELS_VARIABLE: str(tmp_path)}
    agreed(lambda: PLAIN, here)
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert agreed(lambda: TURNED, here) == TURNED
    assert agreed(lambda: TURNED, {KERNELS_VARIABLE: str(tmp_path / "gone")}) == TURNED


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({GATE_UP: Order.ROWS}, DOWN),
        ({**PLAIN, "attention": "fused"}, "attention"),
        ({**PLAIN, DOWN: "sideways"}, f"{DOWN}: sideways"),
    ],
)
def test_choices_of_another_release_are_refused_by_name(
    choices: dict[str, str], named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        check(choices)


class Inline:
    """Runs at once what is put into it."""

    def put(self, function: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except ElasticError as exc:
            future.set_exception(exc)
        return future


class Rank1:
    """Executor and step loop of a rank that computes with `kernels`."""

    def __init__(self, kernels: dict[str, str], *, serves: bool) -> None:
        self.kernels = kernels
        group = SimpleNamespace(epoch=Epoch(1))
        self.current = (
            SimpleNamespace(epoch=Epoch(1), group=group, topology=Topology(Epoch(1)))
            if serves
            else None
        )
        self.pending = None
        self.calls = Inline()
        self.state = EngineState.SERVING if serves else EngineState.ATTACHED
        self.epochs = Epochs(
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            Path(),
            SECOND,
            SimpleNamespace(endpoint=dict, keep_only=lambda workers: None),  # type: ignore[arg-type]
        )

    def group(self, epoch: Epoch, rank: Rank, world_size: int) -> HostExpertGroup:
        return HostExpertGroup(epoch, rank, world_size)

    def withdraw(self, epoch: Epoch) -> None: ...

    def keep_only(self, groups: Any) -> None: ...

    def adopt(self, kernels: dict[str, str]) -> None:
        check(kernels)
        self.kernels = kernels

    def meet(self, kernels: dict[str, str]) -> None:
        """Connect to a first rank that computes with `kernels`, and is not there."""
        said = self.epochs.open(Epoch(2), Rank(1), 2)
        assert said["kernels"] == self.kernels
        members = [Member(w, Incarnation(""), ()) for w in (FIRST, SECOND)]
        endpoints = {FIRST: {"group": "127.0.0.1:1", "kernels": kernels}, SECOND: said}
        try:
            self.epochs.connect(Topology(Epoch(2), tuple(members)), endpoints, timeout_s=0.2)
        except EngineError as exc:
            if not isinstance(exc.__cause__, PeerLost):
                raise
        finally:
            self.epochs.abort(Epoch(2))


def test_a_joiner_adopts_the_kernels_of_the_first_rank() -> None:
    joiner = Rank1(dict(PLAIN), serves=False)
    joiner.meet(dict(TURNED))
    assert joiner.kernels == TURNED


def test_what_a_joiner_does_not_have_ends_the_operation() -> None:
    joiner = Rank1(dict(PLAIN), serves=False)
    with pytest.raises(EngineError, match="another release"):
        joiner.meet({**PLAIN, DOWN: "sideways"})
    assert joiner.kernels == PLAIN


def test_a_rank_that_serves_changes_nothing() -> None:
    serving = Rank1(dict(PLAIN), serves=True)
    with pytest.raises(EngineError, match=r"serves with kernels .* slot0 has"):
        serving.meet(dict(TURNED))
    assert serving.kernels == PLAIN
    serving.meet(dict(PLAIN))
