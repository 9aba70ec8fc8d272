"""Secrets in files: read if they are ours alone, made so, compared in constant time."""

from __future__ import annotations

import hmac
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo_elastic.config import api_token
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.secret_files import is_token, make_secret, read_secret
from dynamo_elastic.testing.deployments import deployment


def secret(path: Path, text: str = "word\n", mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_one_word_is_read(tmp_path: Path) -> None:
    assert read_secret(secret(tmp_path / "a"), "x.y") == "word"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret(tmp_path / "a", mode=mode)
    with pytest.raises(ConfigError, match=rf"^x\.y: others may read {path}; run: chmod 600"):
        read_secret(path, "x.y")


@pytest.mark.parametrize("text", ["", " \n", "two words", "two\nlines", "caf\xe9", "bell\x07"])
def test_what_is_no_word_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.y: .*must hold one word"):
        read_secret(secret(tmp_path / "a", text), "x.y")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^x\.y: .*can't be read"):
        read_secret(tmp_path / "none", "x.y")


def test_of_all_who_make_a_secret_one_does(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: make_secret(path), range(32)))
    first = read_secret(path, "x")
    assert len(first) >= 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    make_secret(path)
    assert read_secret(path, "x") == first
    assert [p.name for p in tmp_path.iterdir()] == ["token"]


def test_a_deployment_without_a_token_file_makes_its_own(tmp_path: Path) -> None:
    config = deployment(tmp_path)
    token = api_token(config)
    assert config.api_token_file == config.state_dir / "api.token"
    assert read_secret(config.api_token_file, "x") == token == api_token(config)
    assert stat.S_IMODE(config.state_dir.stat().st_mode) == 0o700


def test_a_token_file_that_is_set_is_never_made(tmp_path: Path) -> None:
    config = deployment(tmp_path, coordinator={"api": {"token_file": str(tmp_path / "t")}})
    with pytest.raises(ConfigError, match=r"coordinator\.api\.token_file"):
        api_token(config)
    assert not (tmp_path / "t").exists()


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert is_token(" word ", "word")
    assert not is_token("w\xe9rd", "word")
    assert compared == [(b"word", b"word"), ("w\xe9rd".encode(), b"word")]
    assert not is_token("", "")
