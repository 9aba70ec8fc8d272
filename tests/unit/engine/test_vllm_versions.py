"""Which releases of vLLM and Dynamo are taken, and how others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_elastic.engine.vllm.versions import PAIRS, Standing, check_versions, installed
from dynamo_elastic.errors import ConfigError

PYTHON = Path("/somewhere/bin/python")


def environment(root: Path, **versions: str) -> Path:
    """An environment with these distributions; the path of its interpreter, which is not there."""
    folder = root / "lib" / "python3.11" / "site-packages"
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
    return root / "bin" / "python"


def test_versions_are_read_from_the_engines_environment(tmp_path: Path) -> None:
    python = environment(tmp_path, vllm="0.31.0+cpu", ai_dynamo="1.6.1", torch="2.13.0")
    found = installed(python)
    assert (found["vllm"], found["ai-dynamo"], found["torch"]) == ("0.31.0+cpu", "1.6.1", "2.13.0")
    assert found["transformers"] == ""
    assert check_versions(found, python) is Standing.RUN


@pytest.mark.parametrize(("pair", "standing"), PAIRS.items())
def test_each_pair_of_the_table_is_taken_as_what_it_is(
    pair: tuple[str, str], standing: Standing
) -> None:
    found = {"vllm": pair[0], "ai-dynamo": pair[1]}
    assert check_versions(found, PYTHON) is standing


@pytest.mark.parametrize(
    ("vllm", "dynamo"), [("0.30.2", "1.6.1"), ("0.31.0", "1.7.0"), ("0.31.1", "1.6.1")]
)
def test_any_other_pair_is_refused_and_the_tried_ones_are_named(vllm: str, dynamo: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_versions({"vllm": vllm, "ai-dynamo": dynamo}, PYTHON)
    (fault,) = refused.value.faults
    assert fault.startswith("engine.python: ")
    assert f"vLLM {vllm} with Dynamo {dynamo}" in fault
    assert all(f"vLLM {v} with Dynamo {d}" in fault for v, d in PAIRS)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    python = environment(tmp_path, torch="2.13.0")
    with pytest.raises(ConfigError, match="has no vllm and no ai-dynamo"):
        check_versions(installed(python), python)
