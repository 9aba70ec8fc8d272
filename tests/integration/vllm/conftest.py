from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.testing.vllm_ranks import Ranks, start_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Forks of a process with vLLM's own code and ours in it; each is a rank without a GPU."""
    script = Path(__file__).parent / "elastic_ranks.py"
    found = start_ranks(script, tmp_path_factory.mktemp("ranks") / "log")
    yield found
    found.finish()
