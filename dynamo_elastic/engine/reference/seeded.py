"""Weights made up from a seed, for models that are too large to be kept in a file.

A weight is a function of the seed and its name in the file that there is not, so every rank makes
the same expert, in whatever slot. Numbers differ between kinds of device, not between ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from dynamo_elastic.engine.reference.layout import Piece
from dynamo_elastic.engine.shape import CONFIG_FILE
from dynamo_elastic.errors import ConfigError

SEED_FIELD = "seeded_weights"
"""Of a model's config.json: an integer, in place of a file with weights."""


def read_seed(model_dir: Path) -> int | None:
    """The seed that stands for the weights of `model_dir`; None if they are in a file. Raises
    ConfigError."""
    path = model_dir / CONFIG_FILE
    try:
        seed = json.loads(path.read_text()).get(SEED_FIELD)
    except (OSError, ValueError) as exc:
        raise ConfigError([f"model.path: {path} can't be read: {exc}"]) from exc
    if seed is None or type(seed) is int:
        return seed
    raise ConfigError([f"model.path: {path}: {SEED_FIELD} must be a whole number, got {seed!r}"])


def make_piece(tensor: Tensor, piece: Piece, seed: int) -> None:
    """Fill `tensor` with the weight `piece`: ones, or normal numbers that keep the size of their
    input."""
    if tensor.dim() == 1:
        tensor.fill_(1)
        return
    name = f"{seed} {piece.sources}".encode()
    generator = torch.Generator(tensor.device)
    generator.manual_seed(int.from_bytes(hashlib.blake2s(name, digest_size=7).digest(), "little"))
    deviation = 1.0 if piece.name.endswith("embed") else 1.0 / math.sqrt(tensor.shape[1])
    tensor.normal_(std=deviation, generator=generator)
