"""Tables of docs/gpu.md: made of results, and up to date."""

from __future__ import annotations

import doctest
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tables", BENCHMARKS / "gpu_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(results: Path, name: str, date: str, metrics: dict[str, float]) -> None:
    result = {
        "date": date,
        "commit": "abc",
        "hardware": {"gpus": ["NVIDIA H200, 1 MiB, 580", "NVIDIA H200, 1 MiB, 580"]},
        "metrics": metrics,
        "detail": {"down_phases_s": {"until_left": 0.25, "park": 0.5}},
    }
    (results / f"{name}-{date}.json").write_text(json.dumps(result))


def test_the_page_is_up_to_date(tables: ModuleType) -> None:
    page = tables.PAGE.read_text()
    assert tables.filled(page) == page


def test_the_newest_result_counts(tables: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "gpu_scale", "2026-01-01", {"up_image_s": 9.0})
    write(tmp_path, "gpu_scale", "2026-02-01", {"up_image_s": 2.5, "completed": 0})
    made = tables.table("gpu_scale", tmp_path)
    assert "| 2.500 | 3 | `up_image_s` |" in made
    assert "| down | until_left 0.250, park 0.500 |" in made
    assert "2 x NVIDIA H200, 2026-02-01, commit abc, **not completed**." in made
    assert "9.0" not in made


def test_what_was_not_run_is_not_made_up(tables: ModuleType, tmp_path: Path) -> None:
    page = "a\n<!-- gpu_rounds: begin -->\n| old |\n<!-- gpu_rounds: end -->\nb"
    made = tables.filled(page, tmp_path)
    assert made == "a\n<!-- gpu_rounds: begin -->\nNot run yet.\n<!-- gpu_rounds: end -->\nb"
    assert tables.filled(made, tmp_path) == made
    with pytest.raises(ValueError, match="has no end"):
        tables.filled("<!-- gpu_rounds: begin -->", tmp_path)


def test_capacity_has_a_line_for_each_capacity(tables: ModuleType, tmp_path: Path) -> None:
    metrics: dict[str, float] = {}
    for size, rate in ((2, 1000.0), (16, 500.0)):
        stem = f"capacity_{size}_batch_8"
        metrics |= {f"{stem}_comm_tokens_s": rate, f"{stem}_padded_tokens_s": rate / 2}
        metrics[f"{stem}_buffer_bytes"] = 4e6
    write(tmp_path, "gpu_capacity", "2026-01-01", metrics)
    made = tables.table("gpu_capacity", tmp_path)
    assert "| 2 | 1,000 (1.00) | 500 (1.00) | 4 MB |" in made
    assert "| 16 | 500 (0.50) | 250 (0.50) | 4 MB |" in made


def test_its_examples(tables: ModuleType) -> None:
    assert doctest.testmod(tables).failed == 0
