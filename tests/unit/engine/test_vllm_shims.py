"""Stand-ins for what a release lacks; over a made-up vLLM."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

from dynamo_elastic.engine.vllm import shims

IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """vllm.v1.engine.utils of a vLLM with nothing else; no torchvision is installed."""
    names = ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.utils")
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            monkeypatch.setattr(modules[parent], child, module, raising=False)
    monkeypatch.delitem(sys.modules, IMAGES, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    return modules[names[-1]]


def test_what_is_lacking_gets_a_stand_in_that_says_why(utils: types.ModuleType) -> None:
    assert shims.apply_shims() == (IMAGES, "vllm.v1.engine.utils.get_engine_zmq_addresses")
    try:
        with pytest.raises(NotImplementedError, match="embedding-worker-processes"):
            utils.get_engine_zmq_addresses(None, 1)
        for use in ("smart_resize", "Qwen2VLImageProcessor"):
            with pytest.raises(NotImplementedError, match="torchvision"):
                getattr(sys.modules[IMAGES], use)()
        assert shims.apply_shims() == ()
    finally:
        sys.modules.pop(IMAGES, None)


def test_what_is_there_is_left_alone(
    utils: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = object()
    monkeypatch.setattr(utils, "get_engine_zmq_addresses", there, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there)
    assert shims.apply_shims() == ()
    assert utils.get_engine_zmq_addresses is there
    assert IMAGES not in sys.modules
