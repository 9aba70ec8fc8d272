"""An engine that can't detach says why: nothing of its log is let go before all else is done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_elastic import __version__
from dynamo_elastic.engine.base import DETACHED_FILE, Attach
from dynamo_elastic.engine.reference import boot
from dynamo_elastic.engine.reference.loop import StepLoop
from dynamo_elastic.engine.reference.service import ReferenceEngine
from dynamo_elastic.errors import EngineGone
from dynamo_elastic.types import Incarnation, WorkerId


def warm(control_dir: Path) -> Any:
    """What detach() asks of a WarmEngine."""
    return SimpleNamespace(
        discard=lambda: None,
        settings=SimpleNamespace(control_dir=control_dir),
        weights=SimpleNamespace(arena=SimpleNamespace(size_bytes=1)),
        cache=SimpleNamespace(arena=SimpleNamespace(size_bytes=1)),
        device=SimpleNamespace(held=dict, kernels={}),
        probe="probe",
    )


def test_what_fails_is_told_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go: list[Sequence[int]] = []
    monkeypatch.setattr(boot, "redirect", lambda path, files: let_go.append(files))

    def fails() -> dict[str, str]:
        raise OSError("no metadata")

    with monkeypatch.context() as patched:
        patched.setattr(boot, "versions", fails)
        with pytest.raises(OSError, match="no metadata"):
            boot.detach(cast(boot.WarmEngine, warm(tmp_path)), {})
    assert not let_go
    assert not (tmp_path / DETACHED_FILE).exists()
    boot.detach(cast(boot.WarmEngine, warm(tmp_path)), {})
    assert let_go == [(0, 1, 2)]
    assert (tmp_path / DETACHED_FILE).exists()


def test_an_engine_is_gone_as_soon_as_it_is_detached() -> None:
    """Its socket takes calls for a moment longer, and one in some hundred runs was answered."""
    nothing: Any = None
    loop = StepLoop(nothing, nothing, nothing, peer_timeout_s=1.0)
    me = Attach(Incarnation("w0-1"), WorkerId("w0"), 1, "/dev/null")
    engine = ReferenceEngine(me, loop, nothing, nothing)
    loop.detach()
    for call in (engine.status, lambda: engine.cancel("r")):
        with pytest.raises(EngineGone, match="w0-1 is detached"):
            asyncio.run(call())


def test_our_own_version_needs_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(boot, "version", missing)
    found = boot.versions()
    assert found["dynamo-elastic"] == __version__
    assert found["torch"] != __version__
