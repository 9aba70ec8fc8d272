"""GPU engines over fake buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.testing.buffer_ranks import BUFFER_MODEL, BufferRanks
from dynamo_elastic.testing.expert_buffer import FakeExpertWorld


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, BUFFER_MODEL, seed=3)
    return directory


@pytest.fixture
def world() -> FakeExpertWorld:
    return FakeExpertWorld()


@pytest.fixture
def ranks() -> Iterator[BufferRanks]:
    made = BufferRanks()
    yield made
    made.close()
