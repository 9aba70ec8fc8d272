"""Reference documentation made from the code: `python -m dynamo_elastic.cli.reference` writes it.

docs/reference/config.md (every setting), docs/reference/cli.md (every command),
docs/reference/metrics.md (every metric), those of reference_pages.py (errors, etcd keys, HTTP API,
state machines), examples/full.yaml (every setting at its default), the two
JSON documents in dynamo_elastic/schema, and the table of failpoints in docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic_core import PydanticUndefined
from typer.cli import get_docs_for_click

import dynamo_elastic
from dynamo_elastic import failpoint_table
from dynamo_elastic.cli.config import one_line, yaml_lines
from dynamo_elastic.cli.main import app
from dynamo_elastic.cli.reference_pages import pages
from dynamo_elastic.config import SETTINGS, parse_config
from dynamo_elastic.config_launch import PROCESSES, REFUSED_VARIABLES, SAME_AS, launch_parser
from dynamo_elastic.config_schema import deployment_schema, property_of, type_text
from dynamo_elastic.config_sources import Setting
from dynamo_elastic.coordinator.api_routes import openapi
from dynamo_elastic.metrics import KINDS, Described
from dynamo_elastic.vllm_flags import OWN

ROOT = Path(dynamo_elastic.__file__).parents[1]
_TABLE_BEGINS, _TABLE_ENDS = "<!-- failpoints -->", "<!-- end of failpoints -->"
MADE = "made by `python -m dynamo_elastic.cli.reference`; do not edit"

REQUIRED: dict[str, Any] = {
    "deployment": "local",
    "model": {"path": ".demo/model", "name": "elastic-demo"},
    "scale": {"initial_ranks": 2, "max_ranks": 4},
}
"""Settings without a default, for examples."""

EXAMPLES: dict[str, Any] = {
    "agent.gid": 1000,
    "agent.gpus": [f"GPU-2f0a6a3e-0000-0000-0000-00000000000{n}" for n in range(4)],
    "agent.uids": [1000],
    "coordinator.api.port": 9087,
    "coordinator.api.token_file": "/etc/dynamo-elastic/token",
    "engine.args": "--max-model-len 4096 --gpu-memory-utilization 0.9",
    "engine.python": ".venv-vllm/bin/python",
    "etcd.endpoints": ["http://10.0.0.5:2379"],
    "planner.settings": {"load_min_observations": 3},
}
"""For settings whose default shows little."""

COMMANDS: tuple[str, ...] = (
    "serve -f examples/local.yaml",
    "serve -f examples/local.yaml --elastic-frontend-port 8001 --dry-run",
    "scale 4 -f examples/local.yaml",
    "status -f examples/local.yaml --json",
    "watch -f examples/local.yaml",
    "timeline -f examples/local.yaml",
    "timeline up-7 -f examples/local.yaml --html report.html",
    "timeline --list -f examples/local.yaml",
    "config show -f examples/local.yaml --sources",
    "config schema",
    "agent status -f examples/local.yaml",
    "agent evict all -f examples/local.yaml",
    "doctor -f examples/local.yaml",
    "agent drain -f examples/local.yaml --reason 'driver upgrade'",
    "agent undrain -f examples/local.yaml",
    "snapshot create -f examples/local.yaml --slot 0",
    "snapshot list -f examples/local.yaml --json",
    "snapshot inspect IMAGE -f examples/local.yaml",
    "snapshot verify -f examples/local.yaml",
    "snapshot verify IMAGE --restore -f examples/local.yaml",
    "snapshot restore IMAGE -f examples/local.yaml",
    "snapshot keygen fleet.key",
    "snapshot sign IMAGE -f examples/local.yaml",
    "snapshot rm IMAGE -f examples/local.yaml",
    "snapshot export IMAGE image.tar -f examples/local.yaml",
    "snapshot import image.tar -f examples/local.yaml",
    "snapshot prune -f examples/local.yaml --json",
    "demo --work-dir .demo",
    "version",
)
"""Examples of commands; a test parses each of them."""


def documents() -> dict[Path, str]:
    """Every generated file and its text."""
    schema = Path(dynamo_elastic.__file__).parent / "schema"
    more = {ROOT / "docs" / path: text for path, text in pages(MADE).items()}
    return more | {
        ROOT / "docs/reference/config.md": config_reference(),
        ROOT / "docs/reference/cli.md": cli_reference(),
        ROOT / "docs/reference/metrics.md": metrics_reference(),
        ROOT / "docs/reliability.md": reliability(),
        ROOT / "examples/full.yaml": full_example(),
        schema / "deployment.schema.json": _json(deployment_schema()),
        schema / "coordinator.openapi.json": _json(openapi()),
    }


def reliability() -> str:
    """The page with the table of today between its two marks; the rest of it is written by hand."""
    text = (ROOT / "docs/reliability.md").read_text()
    before, _, rest = text.partition(_TABLE_BEGINS)
    _, _, after = rest.partition(_TABLE_ENDS)
    return f"{before}{_TABLE_BEGINS}\n{failpoint_table.table()}\n{_TABLE_ENDS}{after}"


def example_of(setting: Setting) -> Any:
    """A value of the setting, as plain data."""
    if setting.key in EXAMPLES:
        return EXAMPLES[setting.key]
    required: Any = REQUIRED
    for name in setting.key.split("."):
        required = required.get(name) if isinstance(required, dict) else None
    if required is not None:
        return required
    return _plain(setting.field.get_default(call_default_factory=True))


def spelt(value: Any) -> str:
    """A value as a flag or a variable spells it."""
    return value if isinstance(value, str) else json.dumps(value)


def config_reference() -> str:
    """docs/reference/config.md"""
    schema = deployment_schema()
    lines = [
        f"<!-- {MADE} -->",
        "# Settings",
        "",
        "One YAML file describes a deployment; every process and command reads it (`-f FILE`, "
        "`--elastic-config FILE` or `DYN_ELASTIC_CONFIG`). Each setting also has a flag and a "
        "variable, and the strongest source wins, key by key: **flag, variable, file, default**. "
        "Lists and mappings are replaced whole. An unknown name is an error in any of the three, "
        "as is a boolean other than `true` or `false`; all faults are listed at once, each with "
        "its source and remedy. `dynamo-elastic config show -f FILE --sources` prints what is in "
        "force and where it comes from. Lists are spelt `a,b` or as JSON, mappings as JSON.",
        "",
        "[`examples/full.yaml`](../../examples/full.yaml) has every setting at its default. For "
        "editors: `# yaml-language-server: $schema=` followed by the path of "
        "[`deployment.schema.json`](../../dynamo_elastic/schema/deployment.schema.json), or "
        "`dynamo-elastic config schema`.",
    ]
    section = None
    for setting in SETTINGS.values():
        heading = setting.key.rpartition(".")[0]
        if heading != section:
            section = heading
            lines += ["", f"## {section or 'The deployment'}", "", _section_doc(section, schema)]
            lines += [
                "",
                "| setting | type, default | what it does | example |",
                "|---|---|---|---|",
            ]
        lines.append(_row(setting, schema))
    return "\n".join(lines) + "\n" + _launch_line()


def _section_doc(section: str, schema: dict[str, Any]) -> str:
    if not section:
        return "What is deployed, and where its state is."
    found, _ = property_of(section, schema)
    options = [schema["$defs"][o["$ref"].rpartition("/")[2]] for o in found[0].get("anyOf", [])]
    return "\n\n".join(o.get("description", "") for o in options or found)


def _row(setting: Setting, schema: dict[str, Any]) -> str:
    found, kinds = property_of(setting.key, schema)
    kind = " or ".join(dict.fromkeys(map(type_text, found)))
    field = setting.field
    required = field.default is PydanticUndefined and field.default_factory is None
    default = field.get_default(call_default_factory=True)
    shown = "**required**" if required else f"`{one_line(_plain(default))}`"
    only = f"Kind {' or '.join(kinds)}. " if kinds else ""
    what = only + " ".join((field.description or "").split())
    value = shlex.quote(spelt(example_of(setting)))
    example = f"`{setting.flag} {value}`<br>`{setting.variable}={value}`"
    cells = (f"`{setting.key}`", f"{kind}; {shown}", what, example)
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def _launch_line() -> str:
    same = [f"| `{flag}` | `{key}` |" for flag, key in SAME_AS.items()]
    reasons = {k: why for k, why in {**OWN, **REFUSED_VARIABLES}.items() if k not in SAME_AS}
    refused = [f"| `{name}` | {why} |" for name, why in reasons.items()]
    return "\n".join(
        [
            "",
            "## Flags of dynamo.vllm",
            "",
            "`python -m dynamo_elastic.worker`, `.agent` and `.coordinator` take the launch line "
            "of `python -m dynamo.vllm`: give all of them the same one. These flags are settings "
            "here:",
            "",
            "| flag | setting |",
            "|---|---|",
            *same,
            "",
            "All others are `engine.args` (kind vllm), untouched and in order. These flags and "
            "variables are refused, because elastic operation decides them:",
            "",
            "| flag or variable | why, or what to do |",
            "|---|---|",
            *refused,
            "",
        ]
    )


def cli_reference() -> str:
    """docs/reference/cli.md"""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="dynamo-elastic")
    commands = get_docs_for_click(obj=command, ctx=context, name="dynamo-elastic")
    examples = "\n".join(f"dynamo-elastic {line}" for line in COMMANDS)
    processes = [f"## `python -m dynamo_elastic.{p}`\n\n```\n{_help(p)}```\n" for p in PROCESSES]
    return "\n".join(
        [
            f"<!-- {MADE} -->",
            commands.replace("# `dynamo-elastic`", "# Command line", 1).rstrip(),
            "",
            "## Examples",
            "",
            f"```\n{examples}\n```",
            "",
            "# Processes",
            "",
            "`serve` starts these; start them yourself where it does not run.",
            "",
            *processes,
        ]
    )


def _help(process: str) -> str:
    parser = launch_parser(process)
    parser.formatter_class = partial(argparse.HelpFormatter, width=100)
    return parser.format_help()


_PORTS = {
    "agent": "agent.metrics_port",
    "coordinator": "coordinator.metrics_port",
    "worker": "workers.metrics_port",
}
_PROCESSES = {
    "agent": "of each host",
    "coordinator": "any number, one of which leads",
    "worker": "the shell of each slot",
}


def metrics_reference() -> str:
    """docs/reference/metrics.md"""
    lines = [
        f"<!-- {MADE} -->",
        "# Metrics",
        "",
        "For Prometheus, at `/metrics` of `observe.metrics_host`, on a port that a setting of each "
        "process names; 0, the default, serves none. Units are in the names. Labels have few "
        "values, whatever the number of ranks. [observe.md](../observe.md) says what to look at.",
    ]
    for kind in KINDS:
        process = kind.process
        lines += ["", f"## {process.capitalize()}, {_PROCESSES[process]}", ""]
        lines += [f"Port: `{_PORTS[process]}`.", "", "| metric | type | labels | what |"]
        lines += ["|---|---|---|---|", *map(_metric_row, kind().described())]
    return "\n".join(lines) + "\n"


def _metric_row(metric: Described) -> str:
    labels = ", ".join(f"`{name}`" for name in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.what} |"


def full_example() -> str:
    """examples/full.yaml: every setting at its default, the required ones at an example's."""
    values = parse_config(REQUIRED).model_dump(mode="json")
    lines = [
        "# yaml-language-server: $schema=../dynamo_elastic/schema/deployment.schema.json",
        f"# Every setting at its default; {MADE}.",
    ]
    for text, key in yaml_lines(values, ""):
        indent = text[: len(text) - len(text.lstrip())]
        description = SETTINGS[key].field.description if key else ""
        if description:
            lines.append(f"{indent}# {' '.join(description.split())}")
        lines.append(text)
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def main() -> None:
    """Write every generated file."""
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
