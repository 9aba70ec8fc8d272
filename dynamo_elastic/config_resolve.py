"""Layers of settings made one: the last that names a key wins, and no fault is lost. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from dynamo_elastic.config_sources import (
    FLAG_PREFIX,
    VARIABLE_PREFIX,
    Given,
    Layer,
    Setting,
)
from dynamo_elastic.errors import ConfigError

DEFAULT = "default"

M = TypeVar("M", bound=BaseModel)


class CrossFaults(ValueError):
    """Settings that don't go together; raised by a model's validator, one line a fault:
    'key: what is wrong; remedy'."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[M]):
    """Settings in force, and the origin of each key that is not at its default."""

    config: M
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        return self.origins.get(key, DEFAULT)


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
    if setting.is_boolean and not isinstance(given.value, bool):
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


def _nested(layer: Mapping[str, Given]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, given in layer.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = given.value
    return tree
