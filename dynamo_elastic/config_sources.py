"""Settings as a file, the environment and the command line give them: layers. Pure.

A pydantic model is the only list of settings: each leaf has a key (`scale.max_ranks`), a flag
(`--elastic-scale-max-ranks`) and a variable (`DYN_ELASTIC_SCALE_MAX_RANKS`). A source is a layer,
key to value with its origin. Nothing is dropped here: a name that is no setting is a key of its
layer like any other, and config_resolve.resolve() says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dynamo_elastic.errors import ConfigError

FLAG_PREFIX = "--elastic-"
VARIABLE_PREFIX = "DYN_ELASTIC_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree of settings."""

    key: str
    annotation: Any
    field: FieldInfo

    @property
    def flag(self) -> str:
        return FLAG_PREFIX + self.key.replace(".", "-").replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.key.replace(".", "_").upper()

    @property
    def is_boolean(self) -> bool:
        return bool in _kinds(self.annotation)

    def read(self, text: str) -> Any:
        """The value that a flag or a variable spells. Raises ValueError with what to write."""
        kinds = _kinds(self.annotation)
        if NoneType in kinds and text == "null":
            return None
        if self.is_boolean:
            if text not in ("true", "false"):
                raise ValueError("must be true or false")
            return text == "true"
        if kinds & {tuple, list, frozenset}:
            return _json(text, list) if text.startswith("[") else text.split(",")
        if dict in kinds:
            return _json(text, dict)
        return text


@dataclass(frozen=True, slots=True)
class Given:
    """A value and where it came from. `text`: as a flag or a variable spells it."""

    value: Any
    origin: str
    text: bool = False


Layer = Mapping[str, Given]


def settings_of(model: type[BaseModel], prefix: str = "") -> dict[str, Setting]:
    """Every leaf setting of `model` by key, in order. Of a union of sections, the settings of all
    of them."""
    found: dict[str, Setting] = {}
    for name, field in model.model_fields.items():
        key = prefix + name
        sections = [m for m in _members(field.annotation) if _is_section(m)]
        if not sections:
            found[key] = Setting(key, field.annotation, field)
        for section in sections:
            for inner, setting in settings_of(section, f"{key}.").items():
                known = found.get(inner)
                found[inner] = setting if known is None else _either(known, setting)
    return found


def from_mapping(raw: Mapping[Any, Any], table: Mapping[str, Setting], origin: str = "") -> Layer:
    """A layer of nested settings that are plain data already."""
    return {key: Given(value, origin) for key, value in _flat(raw, table, "")}


def from_yaml(text: str, name: str, table: Mapping[str, Setting]) -> Layer:
    """A layer from a YAML (or JSON) document, each origin with its line. Raises ConfigError if
    it is not YAML, no mapping, or has a key twice."""
    try:
        raw = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as exc:
        raise ConfigError([f"{name}: not YAML: {' '.join(str(exc).split())}"]) from exc
    if not isinstance(raw, dict):
        raise ConfigError([f"{name}: must be a mapping of settings, see examples/local.yaml"])
    lines: dict[str, int] = {}
    twice = []
    for key, line in _lines(root, ""):
        if key in lines:
            twice.append(f"{key}: is there twice; remove one ({name}:{lines[key]} and {line})")
        lines[key] = line
    if twice:
        raise ConfigError(twice)
    return {
        key: Given(value, f"{name}:{lines[key]}" if key in lines else name)
        for key, value in _flat(raw, table, "")
    }


def from_environment(
    environ: Mapping[str, str], table: Mapping[str, Setting], others: Iterable[str] = ()
) -> Layer:
    """A layer from the variables that start with DYN_ELASTIC_, but for `others`."""
    keys = {setting.variable: key for key, setting in table.items()}
    return {
        keys.get(name, name): Given(text, name, text=True)
        for name, text in sorted(environ.items())
        if name.startswith(VARIABLE_PREFIX) and name not in others
    }


def from_flags(
    argv: Sequence[str], table: Mapping[str, Setting], others: Iterable[str] = ()
) -> tuple[dict[str, Given], list[str]]:
    """A layer from the arguments that start with --elastic-, but for `others`, and the rest.

    `--elastic-x VALUE` and `--elastic-x=VALUE` are the same; after `--` all is rest.
    """
    keys = {setting.flag: key for key, setting in table.items()}
    layer: dict[str, Given] = {}
    rest: list[str] = []
    waiting = iter(argv)
    for argument in waiting:
        flag, has_value, text = argument.partition("=")
        if argument == "--":
            rest += [argument, *waiting]
        elif not flag.startswith(FLAG_PREFIX) or flag in others:
            rest.append(argument)
        else:
            value = text if has_value else next(waiting, None)
            layer[keys.get(flag, flag)] = Given(value, flag, text=True)
    return layer, rest


def _flat(
    raw: Mapping[Any, Any], table: Mapping[str, Setting], prefix: str
) -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        key = f"{prefix}{name}"
        section = key not in table and any(k.startswith(f"{key}.") for k in table)
        if section and value is None:
            continue  # all that was in it is commented out
        if section and isinstance(value, Mapping):
            yield from _flat(value, table, f"{key}.")
        else:
            yield key, value


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = f"{prefix}{name.value}"
            yield key, name.start_mark.line + 1
            yield from _lines(value, f"{key}.")


def _members(annotation: Any) -> list[Any]:
    """What `annotation` may be: itself, or the members of the union that it is."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [m for arg in get_args(annotation) for m in _members(arg)]
    return [annotation]


def _kinds(annotation: Any) -> set[Any]:
    return {get_origin(m) or m for m in _members(annotation)}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _either(one: Setting, other: Setting) -> Setting:
    """A setting that several sections of a union have."""
    return Setting(one.key, Union[one.annotation, other.annotation], one.field)  # noqa: UP007


def _json(text: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ValueError(f"must be JSON ({exc})") from exc
    if not isinstance(value, kind):
        raise ValueError(f"must be a JSON {'list' if kind is list else 'object'}")
    return value
