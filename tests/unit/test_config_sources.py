"""Flag before variable before file before default, key by key; nothing is ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from dynamo_elastic.config import SETTINGS, DeploymentConfig, resolve_config
from dynamo_elastic.config_resolve import DEFAULT, Resolved, resolve
from dynamo_elastic.config_sources import (
    Layer,
    from_environment,
    from_flags,
    from_mapping,
    from_yaml,
    settings_of,
)
from dynamo_elastic.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Small(_Section):
    kind: Literal["small"] = "small"
    size: int = 1


class Large(_Section):
    kind: Literal["large"]
    size: int = 2
    words: tuple[str, ...] = ()


class Inner(_Section):
    live: bool = True
    ratio: float = 0.5
    table: dict[str, int] = Field(default_factory=dict)
    maybe: int | None = 7


class Settings(_Section):
    name: str = "none"
    count: int = Field(default=3, ge=0)
    inner: Inner = Inner()
    shape: Annotated[Small | Large, Field(discriminator="kind")] = Small()


TABLE = settings_of(Settings)
DEFAULTS = {"name": "none", "count": 3, "inner.live": True, "inner.ratio": 0.5, "inner.maybe": 7}
VALUES = {
    "name": st.text("abcxyz =-", min_size=1),
    "count": st.integers(0, 99),
    "inner.live": st.booleans(),
    "inner.ratio": st.floats(0, 1, width=16),
    "inner.maybe": st.none() | st.integers(0, 9),
}
LAYERS = st.fixed_dictionaries({}, optional=VALUES)


def spelt(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | type(None)) else str(value)


def resolved(
    file: str = "", environ: Mapping[str, str] | None = None, argv: list[str] | None = None
) -> Resolved[Settings]:
    layers: list[Layer] = [from_yaml(file, "x.yaml", TABLE)] if file else []
    layers.append(from_environment(environ or {}, TABLE))
    flags, rest = from_flags(argv or [], TABLE)
    assert rest == []
    return resolve(Settings, [*layers, flags], TABLE)


def faults(
    file: str = "", environ: Mapping[str, str] | None = None, argv: list[str] | None = None
) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolved(file, environ, argv)
    return caught.value.faults


def got(config: Settings, key: str) -> object:
    node: object = config
    for name in key.split("."):
        node = getattr(node, name)
    return node


@settings(deadline=None)
@given(LAYERS, LAYERS, LAYERS)
def test_the_strongest_source_of_each_key_wins(
    file: dict[str, object], environ: dict[str, object], flags: dict[str, object]
) -> None:
    tree: dict[str, dict[str, object] | object] = {"inner": {}}
    for key, value in file.items():
        section, _, name = key.rpartition(".")
        node = tree[section] if section else tree
        assert isinstance(node, dict)
        node[name] = value
    variables = {TABLE[k].variable: spelt(v) for k, v in environ.items()}
    argv = [f"{TABLE[k].flag}={spelt(v)}" for k, v in flags.items()]
    result = resolved(yaml.safe_dump(tree), variables, argv)
    for key, default in DEFAULTS.items():
        if key in flags:
            expected, origin = flags[key], TABLE[key].flag
        elif key in environ:
            expected, origin = environ[key], TABLE[key].variable
        elif key in file:
            expected, origin = file[key], "x.yaml:"
        else:
            expected, origin = default, DEFAULT
        assert got(result.config, key) == expected
        assert result.origin(key).startswith(origin)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["--model", "x", "--tp=2", "-f", "--elastic-name=a"])))
def test_what_is_not_ours_is_passed_through_in_order(argv: list[str]) -> None:
    layer, rest = from_flags(argv, TABLE)
    assert rest == [a for a in argv if a != "--elastic-name=a"]
    assert set(layer) <= {"name"}


def test_after_two_dashes_nothing_is_ours() -> None:
    layer, rest = from_flags(["--elastic-count", "1", "--", "--elastic-count", "2"], TABLE)
    assert layer["count"].value == "1"
    assert rest == ["--", "--elastic-count", "2"]


def test_every_fault_of_every_source_comes_at_once_with_source_and_remedy() -> None:
    found = faults(
        "name: [1]\ninner:\n  live: 'yes'\n  tabel: {}\ncount: -1",
        {"DYN_ELASTIC_INNER_RATIO": "half", "DYN_ELASTIC_COUNTS": "1", "DYN_OTHER": "1"},
        ["--elastic-inner-lvie", "true", "--elastic-inner-live=yes", "--elastic-shape-size"],
    )
    assert sorted(found) == sorted(
        [
            "name: input should be a valid string, got [1] (x.yaml:1)",
            "inner.live: must be true or false, got 'yes' (x.yaml:3)",
            "inner.tabel: unknown setting; did you mean inner.table? (x.yaml:4)",
            "count: input should be greater than or equal to 0, got -1 (x.yaml:5)",
            "inner.ratio: input should be a valid number, unable to parse string as a number, "
            "got 'half' (DYN_ELASTIC_INNER_RATIO)",
            "DYN_ELASTIC_COUNTS: unknown setting; did you mean DYN_ELASTIC_COUNT?",
            "--elastic-inner-lvie: unknown setting; did you mean --elastic-inner-live?",
            "inner.live: must be true or false, got 'yes' (--elastic-inner-live)",
            "shape.size: needs a value after it (--elastic-shape-size)",
        ]
    )


def test_a_wrong_value_is_a_fault_even_if_it_is_overruled() -> None:
    (fault,) = faults(environ={"DYN_ELASTIC_INNER_LIVE": "1"}, argv=["--elastic-inner-live=true"])
    assert fault == "inner.live: must be true or false, got '1' (DYN_ELASTIC_INNER_LIVE)"


@pytest.mark.parametrize(
    ("text", "expected"), [("a,b", ("a", "b")), ('["a,b", "-c"]', ("a,b", "-c")), ("a", ("a",))]
)
def test_lists(text: str, expected: tuple[str, ...]) -> None:
    shape = resolved("shape: {kind: large}", argv=["--elastic-shape-words", text]).config.shape
    assert isinstance(shape, Large)
    assert shape.words == expected


def test_mappings_are_json() -> None:
    config = resolved(environ={"DYN_ELASTIC_INNER_TABLE": '{"a": 1}'}).config
    assert config.inner.table == {"a": 1}
    (fault,) = faults(environ={"DYN_ELASTIC_INNER_TABLE": "[1]"})
    assert fault.startswith("inner.table: must be a JSON object, got '[1]'")


def test_a_setting_of_another_kind_of_section_is_refused() -> None:
    (fault,) = faults("shape:\n  kind: small\n  words: [a]")
    assert fault == (
        "shape.words: does not go with the other settings of its section; remove it (x.yaml:3)"
    )
    assert TABLE["shape.size"].flag == "--elastic-shape-size"


def test_an_empty_section_is_a_section_of_defaults() -> None:
    assert resolved("inner:\nname: x").config.inner == Inner()
    (fault,) = faults("inner: 3\nname: x")
    assert fault == "inner: must be a mapping of settings (x.yaml:1)"


def test_names_of_the_deployments_settings_are_unique_and_documented() -> None:
    for twins in ([s.flag for s in SETTINGS.values()], [s.variable for s in SETTINGS.values()]):
        assert len(set(twins)) == len(SETTINGS)
    undocumented = [s.key for s in SETTINGS.values() if not s.field.description]
    assert undocumented == [], "write a string under the setting in config.py"


def test_the_deployments_settings_from_all_sources(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("deployment: a\nmodel: {path: m, name: m}\nscale:\n  initial_ranks: 1\n")
    flags, _ = from_flags(["--elastic-scale-initial-ranks", "2"], SETTINGS)
    environ = {"DYN_ELASTIC_SCALE_MAX_RANKS": "2", "DYN_ELASTIC_CONFIG": "ignored"}
    found = resolve_config(path, environ, flags)
    assert (found.config.scale.initial_ranks, found.config.scale.max_ranks) == (2, 2)
    assert found.origin("deployment") == "d.yaml:1"
    assert found.origin("scale.lease_ttl_s") == DEFAULT
    with pytest.raises(ConfigError) as caught:
        resolve_config(path, {}, {})
    assert caught.value.faults == (
        "scale.max_ranks: is required; add it, or give --elastic-scale-max-ranks "
        "or DYN_ELASTIC_SCALE_MAX_RANKS",
    )


def test_a_required_setting_with_a_fault_is_not_missing_as_well(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text("deployment: a\nmodel: {path: m, name: m}\nscale:\n  initial_ranks: 1\n")
    flags, _ = from_flags(["--elastic-scale-max-ranks"], SETTINGS)
    with pytest.raises(ConfigError) as caught:
        resolve_config(path, {}, flags)
    assert caught.value.faults == (
        "scale.max_ranks: needs a value after it (--elastic-scale-max-ranks)",
    )


def test_settings_survive_a_round_trip() -> None:
    raw = {"deployment": "a", "model": {"path": "m", "name": "m"}}
    raw["scale"] = {"initial_ranks": 1, "max_ranks": 4}
    config = resolve(DeploymentConfig, [from_mapping(raw, SETTINGS)], SETTINGS).config
    again = from_yaml(config.model_dump_json(), "x", SETTINGS)
    assert resolve(DeploymentConfig, [again], SETTINGS).config == config
