"""Which of several kernels computes a product: timed once, when an engine is warmed up.

Choices are part of the process, so of its images and of a parked engine. They decide about the last
bits of results, so all ranks of a group have the same: a joiner takes those of the first rank. That
costs it new graphs, so engines of one kind on one host share what the first of them has chosen.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from dynamo_elastic.engine.base import KERNELS_VARIABLE
from dynamo_elastic.errors import EngineError

GATE_UP, DOWN = "experts.gate_up", "experts.down"
_FILE = "choices.json"
_CLEARLY = 0.9
"""A choice that is not faster than this share of the first one's time is not worth another."""


class Order(StrEnum):
    """Which operand of a product of all experts' rows with their weights comes first. The library
    picks another kernel for each."""

    ROWS = "rows"
    WEIGHTS = "weights"


Choices = Mapping[str, str]
"""Product -> Order."""
PLAIN: Choices = {GATE_UP: Order.ROWS, DOWN: Order.ROWS}


def product(order: str, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """`rows` (experts, n, k) by `weights` (experts, m, k): (experts, n, m), into `out` if given."""
    if order == Order.ROWS:
        return torch.bmm(rows, weights.transpose(1, 2), out=out)
    turned = None if out is None else out.transpose(1, 2)
    return torch.bmm(weights, rows.transpose(1, 2), out=turned).transpose(1, 2)


def check(choices: Choices) -> None:
    """Return if this release can compute by `choices`. Raises EngineError naming what it can't."""
    unknown = sorted(choices.keys() ^ PLAIN.keys())
    unknown += [f"{name}: {order}" for name, order in choices.items() if order not in set(Order)]
    if unknown:
        raise EngineError(
            f"kernel choices of another release of this engine: {', '.join(unknown)}; all ranks of "
            "a group need the same release"
        )


def fastest(seconds_of: Callable[[str, str], float]) -> Choices:
    """The quickest order of each product; `seconds_of` (product, order) times one."""
    chosen: dict[str, str] = {}
    for name in PLAIN:
        taken = {order: seconds_of(name, order) for order in Order}
        best = min(Order, key=lambda order: taken[order])
        clear = taken[best] < _CLEARLY * taken[Order.ROWS]
        chosen[name] = str(best if clear else Order.ROWS)
    return chosen


def agreed(tune: Callable[[], Choices], environment: Mapping[str, str] = os.environ) -> Choices:
    """What an engine of this kind has chosen before, or else tune(), kept for those to come."""
    if KERNELS_VARIABLE not in environment:
        return tune()
    path = Path(environment[KERNELS_VARIABLE], _FILE)
    with suppress(OSError, ValueError, EngineError):
        return _read(path)
    chosen = tune()
    with suppress(OSError):
        # Complete when others see it, and the same for all: of several at once the first counts.
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            json.dump(dict(chosen), file)
            file.flush()
            with suppress(FileExistsError):
                os.link(file.name, path)
        with suppress(ValueError, EngineError):
            return _read(path)
    return chosen


def _read(path: Path) -> Choices:
    choices = json.loads(path.read_text())
    if not isinstance(choices, dict):
        raise ValueError(f"{path} holds no choices")
    check(choices)
    return choices


def seconds_on_gpu(act: Callable[[], object], repeats: int = 5) -> float:
    """The quickest of several runs on the current stream, after one that loads the kernel."""
    act()
    taken: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        act()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return min(taken)
