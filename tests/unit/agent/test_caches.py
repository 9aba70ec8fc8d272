"""JIT caches: made, found, refused, forgotten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_elastic.agent.caches import VARIABLES, JitCaches
from dynamo_elastic.agent.ladder import Why

KEY = "0123456789abcdef"


@pytest.fixture
def caches(tmp_path: Path) -> JitCaches:
    return JitCaches(tmp_path / "catalog", max_age_s=100)


def why(caches: JitCaches) -> Why | None:
    obstacle = caches.obstacle(KEY)
    return None if obstacle is None else obstacle.why


def test_caches_are_of_use_once_something_was_compiled(caches: JitCaches, tmp_path: Path) -> None:
    assert why(caches) is Why.ABSENT
    environment = caches.environment(KEY)
    assert set(environment) == set(VARIABLES)
    assert why(caches) is Why.ABSENT
    kernel = Path(environment["TRITON_CACHE_DIR"]) / "k" / "kernel.cubin"
    kernel.parent.mkdir()
    kernel.write_bytes(b"x")
    assert why(caches) is None
    assert caches.environment(KEY) == environment
    for directory in (tmp_path / "catalog", kernel.parents[2], kernel.parents[1]):
        assert directory.stat().st_mode & 0o077 == 0
    caches.discard(KEY)
    assert why(caches) is Why.ABSENT
    # An image may have it mapped.
    assert kernel.exists()
    caches.discard(KEY)
    other = caches.environment(KEY)
    assert other["TRITON_CACHE_DIR"] != environment["TRITON_CACHE_DIR"]
    (Path(other["TRITON_CACHE_DIR"]) / "kernel").write_bytes(b"y")
    assert why(caches) is None


def test_directory_that_others_may_write_is_not_used(caches: JitCaches, tmp_path: Path) -> None:
    directory = Path(caches.environment(KEY)["TRITON_CACHE_DIR"]).parent
    directory.chmod(0o770)
    assert why(caches) is Why.UNUSABLE
    assert caches.environment(KEY) == {}
    directory.chmod(0o700)
    (tmp_path / "catalog").chmod(0o755)
    assert caches.environment(KEY) == {}


def test_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert JitCaches(tmp_path / "file", 100).environment(KEY) == {}


def test_caches_that_nobody_used_go(caches: JitCaches) -> None:
    assert caches.prune() == ()
    directory = Path(caches.environment(KEY)["VLLM_CACHE_ROOT"]).parent
    caches.environment("other")
    os.utime(directory, (1, 1))
    caches.used(KEY)
    assert caches.prune() == ()
    os.utime(directory, (1, 1))
    (line,) = caches.prune()
    assert KEY in line
    assert not directory.exists()
    assert directory.with_name("other.0").exists()
