"""Outputs for the DP coordinator go to it, all others where they went, the last word too."""

from __future__ import annotations

from typing import Any

from dynamo_elastic.engine.vllm.elastic.outputs import TO_COORDINATOR, divert


def test_the_front_end_hears_that_its_engine_core_is_dead() -> None:
    front: list[Any] = []
    coordinator: list[Any] = []
    put = divert(front.append, coordinator.append)
    put((0, "tokens"))
    put((TO_COORDINATOR, "a wave is over"))
    put(b"ENGINE_CORE_DEAD")
    assert front == [(0, "tokens"), b"ENGINE_CORE_DEAD"]
    assert coordinator == ["a wave is over"]
