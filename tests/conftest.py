"""What tests need of a machine: each marker skips, and says why, where its resource is missing."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dynamo_elastic.engine.reference.oracle import Oracle
    from dynamo_elastic.testing.graph_api import Site


def _criu() -> str | None:
    from dynamo_elastic.errors import ElasticError
    from dynamo_elastic.snapshot.criu import Criu

    try:
        Criu.find()
    except ElasticError as exc:
        return str(exc)
    return None


def _vllm() -> str | None:
    root = Path(__file__).parents[1]
    made = root / ".venv-vllm" / ".requirements"
    wanted = (root / "deploy" / "vllm-cpu.txt").read_bytes()
    if made.exists() and made.read_bytes() == wanted:
        return None
    return "needs the environment that `make vllm-cpu` makes"


def _vllm_elastic() -> str | None:
    root = Path(__file__).parents[1]
    made = root / ".venv-vllm-elastic" / ".requirements"
    wanted = (root / "deploy" / "vllm-elastic-cpu.txt").read_bytes()
    if made.exists() and made.read_bytes() == wanted:
        return None
    return "needs the environment that `make vllm-elastic-cpu` makes"


_NEEDS: dict[str, Callable[[], str | None]] = {
    "root": lambda: None if os.geteuid() == 0 else "needs root",
    "criu": _criu,
    "etcd": lambda: None if shutil.which("etcd") else "needs the etcd program",
    "nixl": lambda: None if importlib.util.find_spec("nixl_cu13") else "needs the NIXL wheel",
    "dynamo": lambda: None if importlib.util.find_spec("dynamo") else "needs ai-dynamo",
    "vllm": _vllm,
    "vllm_elastic": _vllm_elastic,
}


@functools.cache
def _gpus() -> int:
    """Counted without the driver: a process that has used it must not fork, and tests/gpu does."""
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))


def _too_few_gpus(marker: pytest.Mark) -> str | None:
    wanted, found = marker.args[0], _gpus()
    return f"needs {wanted} NVIDIA GPUs, found {found}" if found < wanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing: dict[str, str | None] = {}
    for item in items:
        for marker in item.iter_markers():
            if marker.name == "gpu":
                too_few = _too_few_gpus(marker)
                if too_few is not None:
                    item.add_marker(pytest.mark.skip(reason=too_few))
            if marker.name in _NEEDS:
                if marker.name not in missing:
                    missing[marker.name] = _NEEDS[marker.name]()
                reason = missing[marker.name]
                if reason is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small model for reference engines."""
    from dynamo_elastic.engine.reference.make_model import write_model
    from dynamo_elastic.testing.engine_process import SMALL_SHAPE

    directory = tmp_path_factory.mktemp("model")
    write_model(directory, SMALL_SHAPE, seed=5)
    return directory


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    """What one process alone says of it."""
    from dynamo_elastic.engine.reference.oracle import Oracle
    from dynamo_elastic.testing.fleet import TILE

    return Oracle(model, TILE)


@pytest.fixture(scope="session")
def kubernetes_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A real API server, which takes seconds to start: one for all tests."""
    from dynamo_elastic.testing.apiserver import apiserver_missing
    from dynamo_elastic.testing.graph_api import installed_site

    if apiserver_missing():
        pytest.skip(apiserver_missing())
    with installed_site(tmp_path_factory.mktemp("kubernetes")) as site:
        yield site
