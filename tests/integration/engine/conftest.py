"""A small model, and what one process says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.reference.oracle import Oracle
from dynamo_elastic.testing.engine_process import SMALL_SHAPE
from dynamo_elastic.testing.fleet import TILE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SMALL_SHAPE, seed=5)
    return directory


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model, TILE)
