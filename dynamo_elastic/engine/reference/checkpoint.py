"""Weights of a model into the arena: from model.safetensors, of which this is the only reader, or
made up from a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dynamo_elastic.engine.reference.layout import Piece, dense_pieces, expert_pieces
from dynamo_elastic.engine.reference.model import Weights
from dynamo_elastic.engine.reference.seeded import make_piece, read_seed
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.topology import EMPTY

WEIGHTS_FILE = "model.safetensors"


def load_weights(
    model_dir: Path, weights: Weights, experts: Sequence[int], *, dense: bool = True
) -> list[str]:
    """Fill the dense regions, and slot i with expert `experts[i]` (EMPTY: left alone). Without
    `dense` the dense regions are left alone, too.

    Returns the regions that were filled. Raises ConfigError if the file does not hold the model
    that config.json describes; the arena then holds a part of it.
    """
    seed = read_seed(model_dir)
    if seed is not None:
        pieces = list(_pieces(weights, experts, dense))
        for piece in pieces:
            make_piece(weights.tensors[piece.name], piece, seed)
        return [piece.name for piece in pieces]
    path = model_dir / WEIGHTS_FILE
    filled = []
    try:
        with safe_open(path, framework="pt") as file:
            for piece in _pieces(weights, experts, dense):
                parts = [file.get_tensor(name) for name in piece.sources]
                weights.tensors[piece.name].copy_(torch.cat(parts) if parts[1:] else parts[0])
                filled.append(piece.name)
    except (OSError, SafetensorError, RuntimeError) as exc:
        reason = " ".join(str(exc).split())
        raise ConfigError([f"model.path: {path} does not fit config.json: {reason}"]) from exc
    return filled


def _pieces(weights: Weights, experts: Sequence[int], dense: bool) -> Iterator[Piece]:
    if dense:
        yield from dense_pieces(weights.shape)
    for slot, expert in enumerate(experts):
        if expert != EMPTY:
            yield from expert_pieces(weights.shape, slot, expert)
