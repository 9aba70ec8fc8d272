from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.testing.vllm_ranks import Ranks, start_ranks


@pytest.fixture(scope="module")
def no_lookups() -> Iterator[None]:
    """torch looks the name of every address up that it connects to, and its store of whoever comes,
    as an IPv6 address that no hosts file has: dozens of questions in a second, of which a name
    server loses some. Each costs 5 s, and the store stands still meanwhile. So none is asked, by
    forks nor by this process, which has stores of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "attempts:0")
        yield


@pytest.fixture(scope="module")
def ranks(no_lookups: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Forks of a process with vLLM's own code and ours in it; each is a rank without a GPU."""
    script = Path(__file__).parent / "elastic_ranks.py"
    found = start_ranks(script, tmp_path_factory.mktemp("ranks") / "log")
    yield found
    found.finish()
