"""`dynamo-elastic config show | schema`: settings in force, and what settings there are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
import yaml

from dynamo_elastic.cli.serve import ConfigFile
from dynamo_elastic.config import FLAGS, SETTINGS, resolve_config
from dynamo_elastic.config_schema import deployment_schema

app = typer.Typer(help="Settings: those in force, and the schema of all.")


@app.command()
def show(
    file: ConfigFile,
    sources: Annotated[bool, typer.Option(help="Say where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the settings in force: flags, variables, file and defaults made one.

    The output is YAML that `-f` takes again. Nothing is started, and no host is looked at.
    """
    found = resolve_config(file, os.environ, FLAGS.get())
    values = found.config.model_dump(mode="json")
    if as_json:
        origins = {key: found.origin(key) for key in leaf_keys(values, "")}
        print(json.dumps({"settings": values, "sources": origins} if sources else values, indent=1))
        return
    lines = list(yaml_lines(values, ""))
    width = max(len(text) for text, _ in lines)
    for text, key in lines:
        print(f"{text:{width}}  # {found.origin(key)}" if sources and key else text)


@app.command()
def schema() -> None:
    """Print the JSON schema of the deployment YAML, for editors."""
    json.dump(deployment_schema(), sys.stdout, indent=2)
    print()


def yaml_lines(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Each line of the YAML of nested settings, with the key of the setting on it or ''."""
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = f"{prefix}{name}"
        if is_section(key, value):
            yield f"{indent}{name}:", ""
            yield from yaml_lines(value, f"{key}.")
        else:
            yield f"{indent}{name}: {one_line(value)}", key


def leaf_keys(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    return (key for _, key in yaml_lines(values, prefix) if key)


def is_section(key: str, value: object) -> bool:
    """True for settings that have settings of their own; a mapping may be one setting."""
    return isinstance(value, Mapping) and key not in SETTINGS


def one_line(value: object) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").strip()
