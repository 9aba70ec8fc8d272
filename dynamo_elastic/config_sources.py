"""Settings from a file, the environment and the command line made one. Pure.

A pydantic model is the only list of settings: each leaf has a key (`scale.max_ranks`), a flag
(`--elastic-scale-max-ranks`) and a variable (`DYN_ELASTIC_SCALE_MAX_RANKS`). A source is a layer,
key to value; later layers win, key by key. Nothing is ignored: a name that is no setting is a
fault like a value that can't be read, and resolve() lists all faults of all layers at once, each
with where it came from.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dynamo_elastic.errors import ConfigError

FLAG_PREFIX = "--elastic-"
VARIABLE_PREFIX = "DYN_ELASTIC_"
DEFAULT = "default"

M = TypeVar("M", bound=BaseModel)


class CrossFaults(ValueError):
    """Settings that don't go together; raised by a model's validator, one line a fault:
    'key: what is wrong; remedy'."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


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

    def read(self, text: str) -> Any:
        """The value that a flag or a variable spells. Raises ValueError with what to write."""
        kinds = _kinds(self.annotation)
        if NoneType in kinds and text == "null":
            return None
        if bool in kinds:
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


@dataclass(frozen=True, slots=True)
class Resolved(Generic[M]):
    """Settings in force, and the origin of each key that is not at its default."""

    config: M
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        return self.origins.get(key, DEFAULT)


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


def resolve(model: type[M], layers: Sequence[Layer], table: Mapping[str, Setting]) -> Resolved[M]:
    """The settings that `layers` give, the last one that names a key first. Raises ConfigError
    with every fault of every layer, also of values that another layer overrules."""
    faults: list[str] = []
    merged: dict[str, Given] = {}
    bad: set[str] = set()
    for layer in layers:
        for key, given in layer.items():
            try:
                merged[key] = Given(_value(key, given, table), given.origin)
            except ValueError as exc:
                bad.add(key)
                faults.append(_fault(key, str(exc), given))
    usable = {key: given for key, given in merged.items() if key in table and key not in bad}
    try:
        config = model.model_validate(_nested(usable))
    except ValidationError as exc:
        faults += _model_faults(exc, table, usable, bad)
    except ConfigError as exc:
        faults += exc.faults
    if faults:
        raise ConfigError(faults)
    return Resolved(config, {key: given.origin for key, given in usable.items()})


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`, '' if none is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def _value(key: str, given: Given, table: Mapping[str, Setting]) -> Any:
    """The value given. Raises ValueError with what is wrong and the remedy."""
    setting = table.get(key)
    if setting is None:
        raise ValueError(_unknown(key, table))
    if given.text:
        if given.value is None:
            raise ValueError("needs a value after it")
        try:
            return setting.read(given.value)
        except ValueError as exc:
            raise ValueError(f"{exc}, got {given.value!r}") from exc
    if bool in _kinds(setting.annotation) and not isinstance(given.value, bool):
        raise ValueError(f"must be true or false, got {given.value!r}")
    return given.value


def _unknown(key: str, table: Mapping[str, Setting]) -> str:
    if any(known.startswith(f"{key}.") for known in table):
        return "must be a mapping of settings"
    if key.startswith(FLAG_PREFIX):
        known = [s.flag for s in table.values()]
    elif key.startswith(VARIABLE_PREFIX):
        known = [s.variable for s in table.values()]
    else:
        sections = {k.rpartition(".")[0] for k in table}
        known = [*table, *sections]
    meant = nearest(key, known)
    remedy = f"did you mean {meant}?" if meant else "remove it or correct the spelling"
    return f"unknown setting; {remedy}"


def _fault(key: str, message: str, given: Given | None) -> str:
    where = given.origin if given is not None else ""
    return f"{key}: {message}" + (f" ({where})" if where and where != key else "")


def _model_faults(
    error: ValidationError,
    table: Mapping[str, Setting],
    usable: Mapping[str, Given],
    bad: set[str],
) -> Iterator[str]:
    for one in error.errors():
        cross = one.get("ctx", {}).get("error")
        if isinstance(cross, CrossFaults):
            for line in cross.faults:
                key, _, message = line.partition(": ")
                yield _fault(key, message, usable.get(key))
            continue
        key = _key_of(one["loc"], table)
        setting = table.get(key)
        if one["type"] == "missing":
            if key in bad or any(k.startswith(f"{key}.") for k in bad):
                continue
            twins = f", or give {setting.flag} or {setting.variable}" if setting else ""
            yield f"{key}: is required; add it{twins}"
        elif one["type"] == "extra_forbidden":
            message = "does not go with the other settings of its section; remove it"
            yield _fault(key, message, usable.get(key))
        else:
            message = f"{one['msg'][:1].lower()}{one['msg'][1:]}, got {one['input']!r}"
            yield _fault(key, message, usable.get(key))


def _key_of(loc: Sequence[int | str], table: Mapping[str, Setting]) -> str:
    """The setting at a location of pydantic's, which also names members of unions and items."""
    key = ""
    for part in loc:
        longer = f"{key}.{part}" if key else str(part)
        if longer in table:
            return longer
        if any(known.startswith(f"{longer}.") for known in table):
            key = longer
    return key or ".".join(map(str, loc)) or "(top level)"


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


def _nested(layer: Mapping[str, Given]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, given in layer.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = given.value
    return tree


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
