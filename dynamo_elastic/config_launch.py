"""The command line of a process of ours: one launch line for worker, agent and coordinator alike.

It is the line of `python -m dynamo.vllm`, with --elastic-* flags beside its own. What Dynamo's
flags say that is a setting here too becomes that setting; all the rest is `engine.args`, untouched
and in order, and is refused there if elastic operation decides it (vllm_flags.py).
"""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_elastic.config import (
    CONFIG_VARIABLE,
    SETTINGS,
    SLOT_VARIABLE,
    DeploymentConfig,
    resolve_config,
)
from dynamo_elastic.config_sources import FLAG_PREFIX, Given, from_flags
from dynamo_elastic.errors import ConfigError

CONFIG_FLAG = "--elastic-config"
SLOT_FLAG = "--elastic-slot"
_SHOWN_CHARACTERS = 60

SAME_AS: dict[str, str] = {
    "--model": "model.path",
    "--served-model-name": "model.name",
    "--namespace": "namespace",
}
"""Flags of dynamo.vllm that are settings of ours."""

REFUSED_VARIABLES: dict[str, str] = {
    "DYN_SNAPSHOT_CONTROL_DIR": "the agent takes and restores snapshots",
    "DYN_VLLM_GMS_SHADOW_MODE": "a snapshot can't hold another process's weights",
    "DYN_VLLM_HEADLESS": "every rank is an instance of its own; there are no headless ones",
    "SNAPSHOT_RESTORE_STANDBY": "the agent takes and restores snapshots",
    "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH": "dynamo_elastic says who joins",
}


_WHAT = {
    "agent": "Snapshots, restores and starts the engines of one host.",
    "coordinator": "Drives scale operations; any number may run, one leads.",
    "worker": "The shell of one GPU slot: Dynamo instance and participant.",
}
PROCESSES = tuple(_WHAT)


def launch_parser(process: str) -> argparse.ArgumentParser:
    """Of `python -m dynamo_elastic.{process}`: what is no setting, and --help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m dynamo_elastic.{process}",
        description=_WHAT[process],
        allow_abbrev=False,
        epilog=f"Every setting of the YAML has a flag {FLAG_PREFIX}SECTION-NAME and a variable "
        "DYN_ELASTIC_SECTION_NAME: docs/reference/config.md. Other flags are those of "
        "`python -m dynamo.vllm` and reach the engine.",
    )
    parser.add_argument(
        CONFIG_FLAG,
        type=Path,
        metavar="FILE",
        help=f"YAML of the deployment (variable: {CONFIG_VARIABLE})",
    )
    if process == "worker":
        text = f"GPU slot of this host, from 0 (variable: {SLOT_VARIABLE})"
        parser.add_argument(SLOT_FLAG, metavar="N", help=text)
    if process == "coordinator":
        parser.add_argument(
            "--num-experts", type=int, required=True, metavar="N", help="experts of the model"
        )
    return parser


def read_launch_line(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[DeploymentConfig, argparse.Namespace]:
    """The settings in force, and the arguments that are the module's own. Raises ConfigError with
    every fault; exits on --help."""
    flags, rest = from_flags(argv, SETTINGS, (CONFIG_FLAG, SLOT_FLAG))
    own, others = parser.parse_known_args(rest)
    faults = [
        f"{name}: can't be used: {reason}; unset it"
        for name, reason in REFUSED_VARIABLES.items()
        if environ.get(name)
    ]
    try:
        flags = engine_layer(others) | flags
    except ConfigError as exc:
        faults += exc.faults
    file = own.elastic_config or environ.get(CONFIG_VARIABLE)
    if file is None:
        raise ConfigError([*faults, f"{CONFIG_FLAG}: is required; or set {CONFIG_VARIABLE}"])
    try:
        config = resolve_config(Path(file), environ, flags).config
    except ConfigError as exc:
        raise ConfigError([*faults, *exc.faults]) from exc
    if faults:
        raise ConfigError(faults)
    return config, own


def read_slot(own: argparse.Namespace, config: DeploymentConfig, environ: Mapping[str, str]) -> int:
    """The slot that the launch line names. Raises ConfigError."""
    text, slots = own.elastic_slot, config.scale.max_ranks
    origin = SLOT_FLAG if text is not None else SLOT_VARIABLE
    text = environ.get(SLOT_VARIABLE) if text is None else text
    if text is None:
        raise ConfigError([f"{SLOT_FLAG}: is required; or set {SLOT_VARIABLE}"])
    if not text.isdecimal() or int(text) >= slots:
        raise ConfigError([f"{SLOT_FLAG}: must be 0-{slots - 1}, got {text!r} ({origin})"])
    return int(text)


def engine_layer(arguments: Sequence[str]) -> dict[str, Given]:
    """What flags of dynamo.vllm say, as a layer of settings. Raises ConfigError for one of ours
    without its value."""
    layer: dict[str, Given] = {}
    faults: list[str] = []
    passed: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        flag, has_value, text = argument.partition("=")
        key = SAME_AS.get(flag.replace("_", "-"))
        if key is None:
            passed.append(argument)
            continue
        values = [text] if has_value else []
        while not has_value and waiting and not waiting[-1].startswith("-"):
            values.append(waiting.pop())
        if len(values) == 1:
            layer[key] = Given(values[0], flag, text=True)
        else:
            faults.append(f"{flag}: needs one value, got {len(values)}")
    if faults:
        raise ConfigError(faults)
    if passed:
        line = shlex.join(passed)
        shown = textwrap.shorten(line, _SHOWN_CHARACTERS, placeholder=" ...")
        layer["engine.args"] = Given(line, f"launch line: {shown}")
    return layer
