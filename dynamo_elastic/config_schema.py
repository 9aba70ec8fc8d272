"""The JSON schema of a deployment's YAML, and what it says of one setting. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dynamo_elastic.config import DeploymentConfig

SCHEMA_FILE = "deployment.schema.json"


def deployment_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of the YAML of `serve -f`."""
    made = DeploymentConfig.model_json_schema()
    for section in made["properties"].values():
        if "oneOf" in section:  # an empty section would fit all of its kinds, which oneOf forbids
            section["anyOf"] = section.pop("oneOf")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "dynamo_elastic deployment",
    }


def property_of(key: str, schema: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[str]]:
    """What the schema says of one setting, once for each kind of section that has it; and which
    kinds those are, [] if all have it."""
    sections: list[tuple[Mapping[str, Any], str]] = [(schema, "")]
    options = sections
    for name in key.split("."):
        options = [
            (variant, inner or kind)
            for section, kind in sections
            for variant, inner in _variants(section, schema)
        ]
        having = [(v["properties"], kind) for v, kind in options if name in v.get("properties", {})]
        sections = [(properties[name], kind) for properties, kind in having]
    kinds = [kind for _, kind in sections if kind]
    return [_follow(s, schema) for s, _ in sections], kinds if len(sections) < len(options) else []


def type_text(found: Mapping[str, Any]) -> str:
    """A setting's type and bounds in words."""
    if "anyOf" in found:
        return " or ".join(type_text(option) for option in found["anyOf"])
    if "const" in found or "enum" in found:
        return " or ".join(f"`{v}`" for v in found.get("enum", [found.get("const")]))
    words = {
        "string": "path" if found.get("format") == "path" else "text",
        "array": "list",
        "object": "mapping",
        "boolean": "true or false",
        "null": "null",
    }
    text = words.get(found.get("type", ""), found.get("type", "any"))
    return " ".join([text, *_bounds(found)])


def _bounds(found: Mapping[str, Any]) -> Iterator[str]:
    if "minimum" in found and "maximum" in found:
        yield f"{found['minimum']} to {found['maximum']}"
    elif "minimum" in found:
        yield f">= {found['minimum']}"
    if "exclusiveMinimum" in found:
        yield f"> {found['exclusiveMinimum']}"
        if "maximum" in found:
            yield f"<= {found['maximum']}"
    if "pattern" in found:
        yield f"like `{found['pattern']}`"


def _variants(
    section: Mapping[str, Any], schema: Mapping[str, Any]
) -> list[tuple[Mapping[str, Any], str]]:
    """The section itself, or the sections that it may be, each with its kind."""
    section = _follow(section, schema)
    options = [_follow(o, schema) for o in section.get("anyOf", [])]
    if not options:
        return [(section, "")]
    return [(o, o.get("properties", {}).get("kind", {}).get("const", "")) for o in options]


def _follow(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`node`, or what it refers to."""
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    return node
