"""Write a tiny random Qwen3-MoE model that vLLM can serve: `python -m
dynamo_elastic.engine.vllm.make_model DIR [--seed N]`.

It is the reference engine's model without a shared expert, and with the two norms that Qwen3 has in
its attention. Text and tokens stand one for one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dynamo_elastic.engine.reference import make_model
from dynamo_elastic.engine.reference.checkpoint import WEIGHTS_FILE
from dynamo_elastic.engine.shape import ModelShape

TINY_SHAPE = ModelShape(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    intermediate_size=0,
    vocab_size=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    eos_token_id=make_model.EOS,
)
"""625 thousand parameters."""


def write_model(directory: Path, *, seed: int = 0) -> None:
    """Config, weights and tokenizer are in `directory`, which is made."""
    make_model.write_model(directory, TINY_SHAPE, seed=seed)
    tensors = load_file(directory / WEIGHTS_FILE)
    for layer in range(TINY_SHAPE.num_hidden_layers):
        for name in ("q_norm", "k_norm"):
            norm = torch.ones(TINY_SHAPE.head_dim)
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = norm
    save_file(tensors, directory / WEIGHTS_FILE)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen3-MoE model.")
    parser.add_argument("directory", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    write_model(args.directory, seed=args.seed)


if __name__ == "__main__":
    main()
