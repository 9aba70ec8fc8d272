"""Experts of one step: rows go to the ranks that hold their experts and come back computed.

Two exchanges a layer: dispatch (rows out) and results (rows back). The sender weighs and sums, in
the order of the router, so the bits do not depend on which replica computed what.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dynamo_elastic.comm.base import ExpertGroup
from dynamo_elastic.engine.reference.layout import slot_prefix
from dynamo_elastic.engine.reference.model import Routing, Weights, swiglu
from dynamo_elastic.topology import EMPTY, Topology
from dynamo_elastic.types import Rank

_COUNT = struct.Struct("<I")


class LocalExperts:
    """The expert slots of this rank, computed in tiles of a fixed number of rows."""

    def __init__(self, weights: Weights, tile_rows: int) -> None:
        store = weights.store
        size = (tile_rows, weights.shape.hidden_size)
        self._tile = torch.zeros(size, dtype=store.dtype, device=store.device)
        names = [
            [
                f"{slot_prefix(slot)}layers.{layer}."
                for layer in range(weights.shape.num_hidden_layers)
            ]
            for slot in range(weights.slots)
        ]
        self._gate_up = [[weights.tensors[f"{n}gate_up"] for n in row] for row in names]
        self._down = [[weights.tensors[f"{n}down"] for n in row] for row in names]

    def compute(self, slot: int, layer: int, rows: Tensor) -> Tensor:
        """`rows`, any number of them, through the expert in `slot`: the same shape."""
        results = []
        for chunk in torch.split(rows, len(self._tile)):
            self._tile[: len(chunk)] = chunk
            self._tile[len(chunk) :] = 0
            computed = swiglu(self._tile, self._gate_up[slot][layer], self._down[slot][layer])
            results.append(computed[: len(chunk)])
        return torch.cat(results)


class Placement:
    """Which replicas of each expert may be used: those of a topology on ranks that live."""

    def __init__(self, topology: Topology, me: Rank, num_experts: int, masked: frozenset[Rank]):
        self.me = me
        self._replicas: list[list[tuple[Rank, int]]] = [[] for _ in range(num_experts)]
        for rank, member in enumerate(topology.members):
            for slot, expert in enumerate(member.experts):
                if expert != EMPTY and rank not in masked:
                    self._replicas[expert].append((Rank(rank), slot))

    @property
    def lost(self) -> tuple[int, ...]:
        """Experts without a replica that lives."""
        return tuple(e for e, replicas in enumerate(self._replicas) if not replicas)

    def replicas(self, expert: int) -> list[tuple[Rank, int]]:
        """Rank and slot of every replica that may be used, our own alone if there is one."""
        replicas = self._replicas[expert]
        return [r for r in replicas if r[0] == self.me] or replicas

    def choose(self, expert: int, row: int) -> tuple[Rank, int]:
        """Rank and slot for `row`: our own replica if there is one, else spread by row."""
        replicas = self.replicas(expert)
        return replicas[(row + self.me) % len(replicas)]


@dataclass(slots=True)
class _Bundle:
    """Rows for one rank: what they are, and the (row, choice) each result belongs to."""

    slots: list[int]
    sources: list[tuple[int, int]]


class ExpertStep:
    """The experts of one step over a group, as the model calls them.

    `lost` is set when results did not come because a peer was masked: the step must be discarded.
    """

    def __init__(
        self, group: ExpertGroup, placement: Placement, local: LocalExperts, *, timeout_s: float
    ) -> None:
        self.lost = False
        self._group = group
        self._placement = placement
        self._local = local
        self._timeout_s = timeout_s

    def __call__(self, routing: Routing) -> Tensor:
        """Every rank of the group calls this for every layer, with or without rows."""
        bundles = self._bundle(routing)
        hidden = routing.hidden.numpy()
        requests = {
            rank: _pack(b.slots, hidden[[row for row, _ in b.sources]])
            for rank, b in bundles.items()
        }
        received = self._group.exchange(requests, timeout_s=self._timeout_s)
        replies = self._serve(routing.layer, received, hidden.shape[1])
        results = self._group.exchange(replies, timeout_s=self._timeout_s)
        return self._combine(routing, bundles, results)

    def _bundle(self, routing: Routing) -> dict[Rank, _Bundle]:
        bundles: dict[Rank, _Bundle] = {}
        for row, chosen in enumerate(routing.experts[: routing.live].tolist()):
            for choice, expert in enumerate(chosen):
                rank, slot = self._placement.choose(expert, row)
                bundle = bundles.setdefault(rank, _Bundle([], []))
                bundle.slots.append(slot)
                bundle.sources.append((row, choice))
        return bundles

    def _serve(self, layer: int, received: Mapping[Rank, bytes], width: int) -> dict[Rank, bytes]:
        """Compute what the ranks sent, slot by slot over all of them."""
        by_slot: dict[int, list[tuple[Rank, int]]] = defaultdict(list)
        rows: dict[Rank, NDArray[np.float32]] = {}
        for rank in sorted(received):
            slots, rows[rank] = _unpack(received[rank], width)
            for i, slot in enumerate(slots):
                by_slot[slot].append((rank, i))
        answers = {rank: np.empty_like(given) for rank, given in rows.items()}
        for slot in sorted(by_slot):
            places = by_slot[slot]
            given = torch.from_numpy(np.stack([rows[rank][i] for rank, i in places]))
            computed = self._local.compute(slot, layer, given).numpy()
            for (rank, i), row in zip(places, computed, strict=True):
                answers[rank][i] = row
        return {rank: answer.tobytes() for rank, answer in answers.items() if len(answer)}

    def _combine(
        self, routing: Routing, bundles: Mapping[Rank, _Bundle], results: Mapping[Rank, bytes]
    ) -> Tensor:
        size = (*routing.experts.shape, routing.hidden.shape[1])
        computed = np.zeros(size, dtype=np.float32)
        for rank, bundle in bundles.items():
            answer = np.frombuffer(results.get(rank, b""), dtype=np.float32)
            if len(answer) != len(bundle.sources) * size[-1]:
                self.lost = True
                continue
            rows, choices = zip(*bundle.sources, strict=True)
            computed[list(rows), list(choices)] = answer.reshape(-1, size[-1])
        return weighted_sum(torch.from_numpy(computed), routing.weights)


def weighted_sum(computed: Tensor, weights: Tensor) -> Tensor:
    """Sum over the choices of each row, first choice first, so that the order is fixed.

    `computed`: (rows, choices, hidden_size); `weights`: (rows, choices).
    """
    total = computed[:, 0] * weights[:, :1]
    for choice in range(1, computed.shape[1]):
        total = total + computed[:, choice] * weights[:, choice : choice + 1]
    return total


def _pack(slots: Sequence[int], rows: NDArray[np.float32]) -> bytes:
    return _COUNT.pack(len(slots)) + np.array(slots, dtype="<u4").tobytes() + rows.tobytes()


def _unpack(message: bytes, width: int) -> tuple[list[int], NDArray[np.float32]]:
    """Slots and rows of a dispatch; an empty message has none."""
    count = _COUNT.unpack_from(message)[0] if message else 0
    at = _COUNT.size if message else 0
    slots = np.frombuffer(message, dtype="<u4", count=count, offset=at)
    rows = np.frombuffer(message, dtype=np.float32, offset=at + slots.nbytes)
    return slots.tolist(), rows.reshape(count, width)
