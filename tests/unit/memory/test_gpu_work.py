"""The work of the GPU test engine, on the host: what its probe tells."""

from __future__ import annotations

import pytest

from dynamo_elastic.testing.gpu_settings import Fault, GpuEngineSettings, parse
from dynamo_elastic.testing.gpu_work import GpuWork


@pytest.fixture
def work() -> GpuWork:
    return GpuWork(weights_bytes=0, state_bytes=0, graphs=2, seed=1, device="cpu")


def test_probe_is_the_same_once_weights_are_made_anew(work: GpuWork) -> None:
    expected = work.probe()
    work.discard()
    work.populate()
    assert work.probe() != expected
    work.fill(1)
    assert work.probe() == expected


def test_probe_tells_other_weights_and_other_state(work: GpuWork) -> None:
    expected = work.probe()
    work.fill(2)
    assert work.probe() != expected
    work.fill(1)
    work._state[-1, -1] += 1
    assert work.probe() != expected


def test_settings_survive_their_command_line() -> None:
    settings = GpuEngineSettings(parse(["/run/x"]).control_dir, weights_bytes=7, fault=Fault.NCCL)
    assert parse(settings.flags()) == settings
