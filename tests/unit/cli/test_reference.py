"""The reference documentation is the code's: up to date, complete, and its examples are true."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from dynamo_elastic.cli import reference
from dynamo_elastic.cli.main import app
from dynamo_elastic.config import SETTINGS, DeploymentConfig, load_config, parse_config
from dynamo_elastic.config_launch import PROCESSES, launch_parser
from dynamo_elastic.config_resolve import resolve
from dynamo_elastic.config_schema import deployment_schema, property_of
from dynamo_elastic.config_sources import (
    Layer,
    from_environment,
    from_flags,
    from_mapping,
    from_yaml,
)

STARTS = ("dynamo-elastic ", "python -m dynamo_elastic.")
_OF_KIND: dict[str, dict[str, Any]] = {
    "vllm": {"engine": {"kind": "vllm"}},
    "vllm-elastic": {
        "engine": {"kind": "vllm-elastic", "args": "--kv-cache-memory-bytes 1"},
        "scale": {"initial_ranks": 2},
    },
}
EXAMPLES = sorted((reference.ROOT / "examples").rglob("*.yaml"))
DEPLOYMENTS = [p for p in EXAMPLES if "deployment.schema.json" in p.read_text()]


@pytest.mark.parametrize("path", reference.documents(), ids=lambda p: p.name)
def test_up_to_date(path: Path) -> None:
    made = reference.documents()[path]
    assert path.exists()
    assert path.read_text() == made, "run: python -m dynamo_elastic.cli.reference"


def test_every_setting_is_in_the_reference() -> None:
    text = reference.config_reference()
    for setting in SETTINGS.values():
        assert f"| `{setting.key}` |" in text
        assert f"`{setting.flag} " in text
        assert f"{setting.variable}=" in text


@pytest.mark.parametrize("key", SETTINGS)
def test_the_example_of_a_setting_says_the_same_in_all_three_sources(key: str) -> None:
    """Each example is read from flag, variable and file, into the same valid settings."""
    setting = SETTINGS[key]
    example = reference.example_of(setting)
    text = reference.spelt(example)
    base = [from_mapping(reference.REQUIRED, SETTINGS)]
    kinds = property_of(key, deployment_schema())[1]
    if kinds and "reference" not in kinds:
        base.append(from_mapping(_OF_KIND[kinds[0]], SETTINGS))
    if key == "etcd.endpoints":
        base.append(from_mapping({"etcd": {"start": False}}, SETTINGS))
    flags, rest = from_flags(shlex.split(f"{setting.flag} {shlex.quote(text)}"), SETTINGS)
    assert rest == []
    nested = example
    for name in reversed(key.split(".")):
        nested = {name: nested}
    layers: list[Layer] = [
        flags,
        from_environment({setting.variable: text}, SETTINGS),
        from_yaml(yaml.safe_dump(nested), "x.yaml", SETTINGS),
    ]
    found = [resolve(DeploymentConfig, [*base, layer], SETTINGS).config for layer in layers]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda p: p.name)
def test_example_deployments_are_valid(path: Path) -> None:
    load_config(path)
    raw = yaml.safe_load(path.read_text())
    jsonschema.validate(raw, deployment_schema(), jsonschema.Draft202012Validator)
    line = path.read_text().splitlines()[0]
    schema = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", line)
    assert schema is not None, "the first line names the schema, for editors"
    assert (path.parent / schema.group(1)).resolve().exists()


def test_there_are_example_deployments() -> None:
    assert {"local.yaml", "full.yaml"} <= {p.name for p in DEPLOYMENTS}


def test_the_schema_refuses_what_the_settings_refuse() -> None:
    validator = jsonschema.Draft202012Validator(deployment_schema())
    assert validator.is_valid(reference.REQUIRED)
    for bad in ({"typo": 1}, {"scale": {"max_ranks": 4}}, {"engine": {"kind": "other"}}):
        assert not validator.is_valid(reference.REQUIRED | bad)
    vllm = {"engine": {"kind": "vllm", "args": "--seed 1"}}
    assert validator.is_valid(reference.REQUIRED | {"engine": {}})
    assert validator.is_valid(reference.REQUIRED | vllm)


def test_full_yaml_is_the_defaults() -> None:
    full = parse_config(yaml.safe_load(reference.full_example()))
    assert full == parse_config(reference.REQUIRED)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield path
    for name, child in (inner or {}).items():
        yield from leaves(child, (*path, name))


def parsed(line: str) -> tuple[str, ...]:
    """The command that `line` calls, its arguments read as the command line reads them."""
    _, words = from_flags(shlex.split(line), SETTINGS)
    command: Any = typer.main.get_command(app)
    path: tuple[str, ...] = ()
    while hasattr(command, "commands"):
        path = (*path, words[0])
        command, words = command.commands[words[0]], words[1:]
    command.make_context(path[-1], words)
    return path


@pytest.mark.parametrize("line", reference.COMMANDS)
def test_example_commands_are_read(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reference.ROOT)
    parsed(line)


PAGES = [reference.ROOT / "README.md", *sorted((reference.ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_command_lines_of_the_pages_are_read(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reference.ROOT)
    for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line.partition("#")[0]) if line.startswith(STARTS) else []
            if words[:1] == ["dynamo-elastic"]:
                parsed(shlex.join(words[1:]).partition(" > ")[0])
            elif words and (process := words[2].removeprefix("dynamo_elastic.")) in PROCESSES:
                _, unknown = launch_parser(process).parse_known_args(words[3:])
                assert set(unknown) <= {"--max-model-len", "256"}


def test_the_yaml_of_the_adoption_page_is_valid() -> None:
    page = (reference.ROOT / "docs" / "adopt.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    raw = yaml.safe_load(block)
    jsonschema.validate(raw, deployment_schema(), jsonschema.Draft202012Validator)
    assert parse_config(raw).engine.kind == "vllm"


def test_a_wrong_example_command_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed("status -f examples/local.yaml --yaml")


def test_every_command_has_an_example() -> None:
    with_example = {parsed(line) for line in reference.COMMANDS}
    assert set(leaves(typer.main.get_command(app))) - with_example == set(), (
        "add one to COMMANDS in dynamo_elastic/cli/reference.py"
    )
