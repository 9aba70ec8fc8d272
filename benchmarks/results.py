"""The stored results: the newest of each benchmark, and whether they are what they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SCHEMA = Path(__file__).with_name("result.schema.json")

Result = dict[str, Any]


def all_results(folder: Path = RESULTS) -> dict[str, Result]:
    """File name -> result."""
    return {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}


def newest_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Benchmark -> its newest result."""
    newest: dict[str, Result] = {}
    for result in sorted(all_results(folder).values(), key=lambda r: str(r["date"])):
        newest[result["benchmark"]] = result
    return newest


def gpus_of(result: Result) -> str:
    """'2 x NVIDIA H200', '2 CPU cores' of the machine that a result comes from."""
    names = [g.split(",")[0] for g in result["hardware"].get("gpus", ())]
    return f"{len(names)} x {names[0]}" if names else f"{result['hardware']['cores']} CPU cores"


def problems(folder: Path = RESULTS) -> list[str]:
    """Every way in which a result is not as the schema says; [] if all are well."""
    from jsonschema import Draft202012Validator  # GPU machines that only write have none

    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    found = []
    for name, result in all_results(folder).items():
        for error in validator.iter_errors(result):
            found.append(f"{name}: {error.json_path}: {error.message[:200]}")
        if name != f"{result.get('benchmark')}-{result.get('date')}.json":
            found.append(f"{name}: is not named after its benchmark and date")
    return found
