"""Settings: every fault at once, each with its field and its remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.config import (
    FLAGS,
    engine_shape,
    load_config,
    parse_config,
    snapshot_settings,
)
from dynamo_elastic.config_sources import Given
from dynamo_elastic.errors import ConfigError


def good() -> dict[str, Any]:
    return {
        "deployment": "test",
        "model": {"path": "model", "name": "m"},
        "scale": {"initial_ranks": 2, "min_ranks": 2, "max_ranks": 4},
    }


def faults(change: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config({**good(), **change})
    return caught.value.faults


def test_the_example_is_valid() -> None:
    config = load_config(Path(__file__).parents[2] / "examples" / "local.yaml")
    assert config.scale.max_ranks == 4
    assert engine_shape(config, 16).min_ranks == 2


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"modle": {}}, "modle", "unknown setting"),
        ({"scale": {"initial_ranks": 2, "max_ranks": 4, "max": 3}}, "scale.max", "unknown setting"),
        ({"scale": {"initial_ranks": "two", "max_ranks": 4}}, "scale.initial_ranks", "got 'two'"),
        ({"scale": {"initial_ranks": 2}}, "scale.max_ranks", "is required"),
        ({"scale": {"initial_ranks": 5, "max_ranks": 4}}, "scale.initial_ranks", "outside 1-4"),
        ({"deployment": "A b"}, "deployment", "got 'A b'"),
        ({"frontend": {"port": 80}}, "frontend.port", "got 80"),
        ({"frontend": {"port": 2379}}, "etcd.port", "is also frontend.port"),
        ({"planner": {"control_port": 8000}}, "planner.control_port", "is also frontend.port"),
        ({"snapshot": {"max_images_per_slot": 0}}, "snapshot.max_images_per_slot", "got 0"),
        ({"snapshot": {"max_bytes": 1024}}, "snapshot.max_bytes", "got 1024"),
        ({"snapshot": {"max_age_s": 0}}, "snapshot.max_age_s", "got 0"),
        ({"snapshot": {"quarantine_s": -1}}, "snapshot.quarantine_s", "got -1"),
        ({"snapshot": {"prked": 2}}, "snapshot.prked", "unknown setting"),
        ({"coordinator": {"api": {"port": 80}}}, "coordinator.api.port", "0, or 1024"),
        ({"coordinator": {"api": {"port": 8000}}}, "coordinator.api.port", "is also frontend.port"),
        ({"etcd": {"endpoints": ["http://127.0.0.1:1"]}}, "etcd.endpoints", "etcd.start to false"),
    ],
)
def test_one_fault_names_its_field(change: dict[str, Any], field: str, says: str) -> None:
    (fault,) = faults(change)
    assert fault.startswith(f"{field}: ")
    assert says in fault


def test_all_faults_come_at_once() -> None:
    found = faults({"deployment": "", "typo": 1, "frontend": {"port": "x"}})
    assert sorted(f.split(":")[0] for f in found) == ["deployment", "frontend.port", "typo"]


def test_a_disabled_part_takes_no_port() -> None:
    parse_config({**good(), "planner": {"enabled": False, "control_port": 8000}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "must be a mapping"),
        ("a: [", "not YAML"),
        ("deployment: a\ndeployment: b", r"is there twice; remove one \(x\.yaml:1 and 2\)"),
        (None, "can't be read"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(path)


def test_widths_that_cannot_hold_the_model_are_refused() -> None:
    config = parse_config(good())
    with pytest.raises(ConfigError, match=r"scale\.initial_ranks: .* ask for at least 8"):
        engine_shape(config, 64)


def test_snapshot_settings_without_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ELASTIC_SNAPSHOT_CATALOG", "/x")
    monkeypatch.setenv("DYN_ELASTIC_SCALE_MAX_RANKS", "4")
    assert snapshot_settings(None).catalog == Path("/x")
    monkeypatch.setenv("DYN_ELASTIC_SNAPSHOT_CATALOGUE", "/y")
    with pytest.raises(ConfigError, match="did you mean DYN_ELASTIC_SNAPSHOT_CATALOG"):
        snapshot_settings(None)
    flags = {"scale.max_ranks": Given("4", "--elastic-scale-max-ranks", text=True)}
    outer = FLAGS.set(flags)
    try:
        with pytest.raises(ConfigError, match="--elastic-scale-max-ranks: does nothing without"):
            snapshot_settings(None)
    finally:
        FLAGS.reset(outer)
