"""config.json, the command line, and the demo model's files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dynamo_elastic.engine.launch import engine_argv, parse_argv
from dynamo_elastic.engine.reference.make_model import DEMO_SHAPE, words, write_model
from dynamo_elastic.engine.shape import read_shape
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.testing.engine_process import SMALL_SHAPE, engine_config


def test_a_written_model_is_read_back(tmp_path: Path) -> None:
    write_model(tmp_path, SMALL_SHAPE)
    assert read_shape(tmp_path) == SMALL_SHAPE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts": None}, "num_experts must be a whole number"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"num_experts_per_tok": 99}, "above num_experts"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_bad_config_names_the_field(tmp_path: Path, change: dict[str, int], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**asdict(SMALL_SHAPE), **change}))
    with pytest.raises(ConfigError, match=f"model.path.*{says}"):
        read_shape(tmp_path)


def test_missing_config_and_fields(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*can't be read"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ConfigError, match="lacks hidden_size"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        read_shape(tmp_path)


def test_the_command_line_is_read_back(tmp_path: Path) -> None:
    config = engine_config(tmp_path / "model", tmp_path, batch_tokens=4, peer_timeout_s=1.5)
    argv = engine_argv(config, 3)
    assert argv[:3] == [sys.executable, "-m", "dynamo_elastic.engine.reference"]
    settings = parse_argv(argv[3:])
    assert settings.model == tmp_path / "model"
    assert settings.control_dir == config.control_dir(3)
    assert (settings.batch_tokens, settings.peer_timeout_s) == (4, 1.5)


def test_text_and_tokens_stand_one_for_one(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_model(tmp_path, replace(SMALL_SHAPE, vocab_size=DEMO_SHAPE.vocab_size))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = list(range(DEMO_SHAPE.vocab_size))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == " ".join(words(len(ids)))
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text).ids == ids
    assert text.isascii()
    assert text.isprintable()


def test_words_are_distinct() -> None:
    assert len(set(words(512))) == 512
    with pytest.raises(ValueError, match="vocab_size"):
        words(100_000)
