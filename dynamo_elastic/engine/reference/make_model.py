"""Write a small random model that the reference engine and Dynamo can serve.

Run `python -m dynamo_elastic.engine.reference.make_model DIR [--seed N]`. Its vocabulary is words
of three letters with a space between, so text and tokens stand one for one.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dynamo_elastic.engine.reference.checkpoint import WEIGHTS_FILE
from dynamo_elastic.engine.reference.layout import dense_pieces, expert_pieces
from dynamo_elastic.engine.reference.seeded import SEED_FIELD
from dynamo_elastic.engine.shape import CONFIG_FILE, ModelShape

SPECIAL = ("<eos>", "<unk>", "<system>", "<user>", "<assistant>")
"""The first ids of the vocabulary. They are plain words: decoding shows them too."""
EOS = 0

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

DEMO_SHAPE = ModelShape(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    intermediate_size=1024,
    vocab_size=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    eos_token_id=EOS,
)
"""50 MB of experts, 17 MB of dense weights; a step is a few milliseconds of one core."""

_LOGIT_SCALE = 2.0


def words(count: int) -> list[str]:
    """`count` distinct words: SPECIAL, then consonant-vowel-consonant syllables."""
    syllables = [a + v + b for a in "bdfgjklmnprstvwz" for v in "aeiou" for b in "dklmnprst"]
    if count > len(SPECIAL) + len(syllables):
        raise ValueError(f"vocab_size {count} is above {len(SPECIAL) + len(syllables)} words")
    return [*SPECIAL, *syllables][:count]


def random_tensors(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    """Every tensor of a model file, seeded; matrices are scaled to keep the size of their input."""
    generator = torch.Generator().manual_seed(seed)
    pieces = list(dense_pieces(shape))
    for expert in range(shape.num_experts):
        pieces += expert_pieces(shape, 0, expert)
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        for name, rows in zip(piece.sources, _source_rows(shape, piece.sources), strict=True):
            tensors[name] = _random(name, (rows or piece.shape[0], *piece.shape[1:]), generator)
    head = tensors["model.embed_tokens.weight" if shape.tie_word_embeddings else "lm_head.weight"]
    # Their logit is 0 whatever comes before: rarely drawn, and never the most likely one.
    head[: len(SPECIAL)] = 0
    return tensors


def _source_rows(shape: ModelShape, sources: tuple[str, ...]) -> list[int]:
    """Rows of each of the stacked `sources`; 0 where one source is the whole piece."""
    if len(sources) == 1:
        return [0]
    if len(sources) == 3:
        kv_rows = shape.num_key_value_heads * shape.head_dim
        return [shape.num_attention_heads * shape.head_dim, kv_rows, kv_rows]
    shared = "shared_expert" in sources[0]
    return [shape.intermediate_size if shared else shape.moe_intermediate_size] * 2


def _random(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(size) == 1:
        return torch.ones(size)
    tensor = torch.randn(size, generator=generator)
    if name == "model.embed_tokens.weight":
        return tensor
    scale = _LOGIT_SCALE if name == "lm_head.weight" else 1.0
    return tensor * (scale / math.sqrt(size[1]))


def write_model(
    directory: Path, shape: ModelShape = DEMO_SHAPE, *, seed: int = 0, in_file: bool = True
) -> None:
    """Write config, weights, tokenizer and generation config into `directory`, which is made.

    With `in_file` false the seed stands for the weights, which engines make up."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "bos_token_id": EOS,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        **asdict(shape),
    }
    if not in_file:
        config[SEED_FIELD] = seed
    generation = {"bos_token_id": EOS, "eos_token_id": shape.eos_token_id}
    _write_json(directory / CONFIG_FILE, config)
    _write_json(directory / "generation_config.json", generation)
    _write_json(directory / "tokenizer.json", _tokenizer(shape.vocab_size))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config())
    if in_file:
        save_file(random_tensors(shape, seed), directory / WEIGHTS_FILE)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    vocabulary = {word: i for i, word in enumerate(words(vocab_size))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": SPECIAL[1]},
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[EOS],
        "eos_token": SPECIAL[EOS],
        "unk_token": SPECIAL[1],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a small random MoE model.")
    parser.add_argument("directory", type=Path, help="where to write it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    write_model(args.directory, seed=args.seed)


if __name__ == "__main__":
    main()
