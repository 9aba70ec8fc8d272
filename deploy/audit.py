"""Are the pinned packages what we say, and is any of them known to be vulnerable?

    python deploy/audit.py [--strict] [--service URL]

The pins are checked always: every requirement is one exact version, every dependency of
pyproject.toml is among them and allows that version, and what is installed is what is pinned.
Known vulnerabilities are asked for at OSV, which has the advisories of PyPI and GitHub, in one
request. Where it can't be reached this says that nothing was audited; with --strict that is a
failure, too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SERVICE = "https://api.osv.dev/v1/querybatch"
ACCEPTED: dict[str, str] = {}
"""Id of an advisory -> why it does not concern us. One that is not found any more has to go."""
_TIMEOUT_S = 3.0
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)$")


def read_pins(text: str) -> tuple[dict[str, str], list[str]]:
    """Name -> version, and what is no exact version."""
    lines = [x.strip() for x in text.splitlines() if x.strip() and not x.startswith("#")]
    matches = {line: _PIN.match(line) for line in lines}
    pins = {canonicalize_name(m[1]): m[2] for m in matches.values() if m is not None}
    return pins, [f"{line}: not one exact version" for line, m in matches.items() if m is None]


def pin_faults(pins: Mapping[str, str], wanted: list[str]) -> Iterator[str]:
    """Dependencies that are not pinned, or pinned to what they don't allow or is not installed."""
    for text in wanted:
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        if version is None:
            yield f"{requirement.name}: not pinned in deploy/requirements.txt"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}: {version} is pinned, pyproject.toml wants {text}"
    for name, version in pins.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield f"{name}: pinned and not installed; run: make setup"
            continue
        if here.partition("+")[0] != version.partition("+")[0]:
            yield f"{name}: {version} is pinned, {here} is installed; run: make setup"


def advisories(pins: Mapping[str, str], service: str) -> list[str]:
    """'name version: ID' of each known vulnerability. Raises OSError or ValueError if nobody, or
    something else, answers."""
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version.partition("+")[0]}
        for name, version in pins.items()
    ]
    request = urllib.request.Request(
        service, json.dumps({"queries": queries}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        results = json.load(response)["results"]
    if len(results) != len(queries):
        raise ValueError(f"{len(results)} answers to {len(queries)} questions")
    return [
        f"{name} {version}: {found['id']}"
        for (name, version), result in zip(pins.items(), results, strict=True)
        for found in result.get("vulns", ())
    ]


def main(argv: list[str] | None = None) -> int:
    """0: nothing is wrong, as far as could be asked; 1: something is."""
    parser = argparse.ArgumentParser(description="Check pinned packages.")
    parser.add_argument("--strict", action="store_true", help="fail if nobody could be asked")
    parser.add_argument("--service", default=SERVICE, help="another OSV (default: %(default)s)")
    options = parser.parse_args(argv)
    pins, faults = read_pins((ROOT / "deploy" / "requirements.txt").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    faults += pin_faults(pins, project["dependencies"])
    try:
        found = advisories(pins, options.service)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        sys.stderr.write(
            f"audit: NOT audited for known vulnerabilities: {options.service}: {exc}\n"
        )
        faults += ["nobody could be asked for known vulnerabilities"] if options.strict else []
    else:
        faults += [x for x in found if x.rpartition(": ")[2] not in ACCEPTED]
        known = {x.rpartition(": ")[2] for x in found}
        faults += [f"{name}: accepted, and not found any more" for name in ACCEPTED.keys() - known]
        sys.stdout.write(f"audit: {len(pins)} packages, {len(found)} known vulnerabilities\n")
    for fault in faults:
        sys.stderr.write(f"audit: {fault}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
