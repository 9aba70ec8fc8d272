"""No secret of the machine is in an image, nor in the environment or command line of an engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dynamo_elastic.agent.boot import engine_environment, shapes_engine
from dynamo_elastic.config import api_token, load_config
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.testing.certificates import Authority
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.served import run_cli

PLANTED = {
    name: f"planted-{number:02d}-{os.urandom(6).hex()}"
    for number, name in enumerate(
        (
            "AWS_SECRET_ACCESS_KEY",
            "DATABASE_URL",
            "DYN_SECRET",
            "ETCD_AUTH_CLIENT_KEY",
            "ETCD_AUTH_PASSWORD",
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "NCCL_AUTH_TOKEN",
            "NVIDIA_API_KEY",
            "OPENAI_API_KEY",
            "PGPASSWORD",
            "UCX_PRIVATE_KEY",
            "VLLM_API_KEY",
        )
    )
}
"""Variables that whoever starts an agent may have, some with names that engines are given."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="de-") as name:
        yield Path(name)


def test_variables_are_passed_on_by_name_and_none_that_is_named_like_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UCX_TLS", "tcp")
    given = engine_environment()
    assert not set(given) & set(PLANTED)
    assert given["UCX_TLS"] == "tcp"
    assert not [name for name in PLANTED if shapes_engine(name)]


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.nixl
def test_a_real_image_holds_no_planted_secret(directory: Path) -> None:
    """Not of the environment, nor of the files that agent and shells read; but it does hold what
    the engine was told, so the search is one that finds."""
    secrets = dict(PLANTED)
    password, token = directory / "password", directory / "home" / ".cache/huggingface/token"
    token.parent.mkdir(parents=True)
    for path in (password, token):
        secrets[path.name] = f"planted-{path.name}-{os.urandom(6).hex()}"
        path.touch(mode=0o600)
        path.write_text(secrets[path.name])
    pair = Authority(directory / "pki").issue("worker")
    file = settings(directory, password, pair.cert, pair.key, directory / "pki" / "ca.pem")
    secrets["key"] = pair.key.read_text().splitlines()[1]
    secrets["api"] = api_token(load_config(file))
    marker = f"visible-{os.urandom(6).hex()}"
    made = run_cli(
        *("snapshot", "create", "-f", str(file)),
        timeout_s=100,
        env=os.environ | PLANTED | {"HOME": str(directory / "home"), "UCX_MARKER": marker},
    )
    assert made.returncode == 0, made.stderr
    (image,) = (p for p in (directory / "images").iterdir() if p.name.startswith("slot"))
    found = {n: search(image, value) for n, value in (secrets | {"marker": marker}).items()}
    assert found.pop("marker"), "what is passed on is in its memory"
    assert [name for name, files in found.items() if files] == []


def settings(directory: Path, password: Path, cert: Path, key: Path, ca: Path) -> Path:
    write_model(directory / "model", SMALL_SHAPE)
    file = directory / "deployment.yaml"
    etcd = {
        "start": False,
        "endpoints": ["https://127.0.0.1:9"],
        "ca_file": str(ca),
        "cert_file": str(cert),
        "key_file": str(key),
        "user": "worker",
        "password_file": str(password),
    }
    deployment = {
        "deployment": "test",
        "model": {"path": str(directory / "model"), "name": "m"},
        "scale": {"initial_ranks": 1, "max_ranks": 1},
        "snapshot": {"catalog": str(directory / "images")},
        "etcd": etcd,
        "run_dir": str(directory / "run"),
    }
    file.write_text(yaml.safe_dump(deployment))
    return file


def search(image: Path, secret: str) -> list[str]:
    """Files of the image that have it, as text or as UTF-32, which Python's strings may be."""
    wide = secret.encode("utf-32-le")
    data = {path.name: path.read_bytes() for path in image.iterdir()}
    return [name for name, text in data.items() if secret.encode() in text or wide in text]
