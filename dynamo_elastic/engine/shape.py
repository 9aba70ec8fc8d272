"""What a model is, read from its config.json; knows no tensors, so every process may use it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dynamo_elastic.errors import ConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a mixture-of-experts decoder, under the names that Hugging Face uses."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    intermediate_size: int
    """Of the dense MLP that every token passes besides its experts; 0 for none."""
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_id: int
    tie_word_embeddings: bool = False


_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""What models call the number of their routed experts."""


def read_experts(model_dir: Path) -> int:
    """How many routed experts a layer of the model in `model_dir` has, whatever its family. Raises
    ConfigError that says what to do."""
    path = model_dir / CONFIG_FILE
    raw = _read(path)
    found = [raw[name] for name in _EXPERTS if isinstance(raw.get(name), int)]
    if not found:
        raise ConfigError(
            [f"model.path: {path} has none of {', '.join(_EXPERTS)}; ranks share a MoE's experts"]
        )
    return int(found[0])


def read_shape(model_dir: Path) -> ModelShape:
    """The shape of the model in `model_dir`. Raises ConfigError that says what to do."""
    path = model_dir / CONFIG_FILE
    return _shape_of(_read(path), path)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except OSError as exc:
        raise ConfigError(
            [f"model.path: {path} can't be read ({exc.strerror}); name a model directory"]
        ) from exc
    except ValueError as exc:
        raise ConfigError([f"model.path: {path} is not JSON ({exc}); restore the file"]) from exc
    if not isinstance(raw, dict):
        raise ConfigError([f"model.path: {path} must hold an object; restore the file"])
    return raw


def _shape_of(raw: dict[str, Any], path: Path) -> ModelShape:
    known = [f.name for f in fields(ModelShape)]
    missing = [n for n in known if n not in raw and n != "tie_word_embeddings"]
    if missing:
        raise ConfigError(
            [f"model.path: {path} lacks {', '.join(missing)}; the engine needs a MoE decoder"]
        )
    shape = ModelShape(**{n: raw[n] for n in known if n in raw})
    faults = _faults(shape)
    if faults:
        raise ConfigError([f"model.path: {path}: {fault}" for fault in faults])
    return shape


def _faults(shape: ModelShape) -> list[str]:
    faults = []
    for field in fields(ModelShape):
        value = getattr(shape, field.name)
        lowest = 0 if field.name in ("intermediate_size", "eos_token_id") else 1
        if field.type == "int" and (type(value) is not int or value < lowest):
            faults.append(f"{field.name} must be a whole number from {lowest}, got {value!r}")
    if faults:
        return faults
    if shape.num_attention_heads % shape.num_key_value_heads:
        faults.append("num_attention_heads must be a multiple of num_key_value_heads")
    if shape.num_experts_per_tok > shape.num_experts:
        faults.append("num_experts_per_tok is above num_experts")
    if shape.head_dim % 2:
        faults.append("head_dim must be even")
    return faults
