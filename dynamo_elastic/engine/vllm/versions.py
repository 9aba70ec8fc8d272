"""Which releases of vLLM and Dynamo were tried together. Imports neither."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from dynamo_elastic.errors import ConfigError

VLLM = "vllm"
DYNAMO = "ai-dynamo"
REPORTED = (VLLM, DYNAMO, "ai-dynamo-runtime", "torch", "transformers")
"""Distributions on whose versions an image depends."""


class Standing(StrEnum):
    """What is known of a pair of releases."""

    RUN = "run"
    """Served, scaled and restored from images, on the CPU."""
    READ = "read, not run"
    """Every symbol that we wrap was found in the sources; nothing was started."""


PAIRS: Mapping[tuple[str, str], Standing] = {
    ("0.31.0", "1.6.1"): Standing.RUN,
    ("0.33.0", "1.6.1"): Standing.READ,
}
"""(vLLM, Dynamo) -> what is known. The one table: all others are refused."""


ELASTIC = "0.33.0"
"""The vLLM whose ranks can share experts here: see engine/vllm/v0_33."""


def check_elastic(found: Mapping[str, str]) -> None:
    """Raises ConfigError unless ranks of that environment can share experts."""
    version = found[VLLM].partition("+")[0]
    if version != ELASTIC:
        raise ConfigError(
            [f"engine.kind: vllm-elastic is for vLLM {ELASTIC}, and {version} is installed; use it"]
        )


def installed(python: Path) -> dict[str, str]:
    """Versions of REPORTED in the environment of that interpreter, '' for what it lacks. Starts no
    process."""
    paths = _site_packages(python)
    found = dict.fromkeys(REPORTED, "")
    for name in REPORTED:
        for distribution in metadata.distributions(name=name, path=paths):
            found[name] = distribution.version
            break
    return found


def _site_packages(python: Path) -> list[str]:
    if python == Path(sys.executable):
        return sys.path
    return [str(path) for path in python.parent.parent.glob("lib/python3.*/site-packages")]


def check_versions(found: Mapping[str, str], python: Path) -> Standing:
    """What is known of the pair that `python` has. Raises ConfigError, naming the tried pairs, if
    it is not in the table."""
    missing = [name for name in (VLLM, DYNAMO) if not found.get(name)]
    if missing:
        raise ConfigError(
            [
                f"engine.python: {python} has no {' and no '.join(missing)}; name the interpreter "
                "of an environment that has both"
            ]
        )
    # '0.31.0+cpu' is a build of 0.31.0.
    pair = (found[VLLM].partition("+")[0], found[DYNAMO].partition("+")[0])
    standing = PAIRS.get(pair)
    if standing is None:
        tried = ", ".join(f"vLLM {v} with Dynamo {d}" for v, d in PAIRS)
        raise ConfigError(
            [
                f"engine.python: {python} has vLLM {pair[0]} with Dynamo {pair[1]}, which nobody "
                f"tried; install one of: {tried}"
            ]
        )
    return standing
