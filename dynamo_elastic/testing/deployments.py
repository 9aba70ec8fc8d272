"""Deployments for tests: a configuration in a directory of its own, and stand-in engines."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec

from dynamo_elastic.config import DeploymentConfig, parse_config
from dynamo_elastic.testing import standin_engine

P = ParamSpec("P")
_TEST_TIMEOUT_S = 100.0


def asyncio_test(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs a coroutine test in an event loop of its own, with a deadline."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            async with asyncio.timeout(_TEST_TIMEOUT_S):
                await test(*args, **kwargs)

        asyncio.run(main())

    return run


def deployment(directory: Path, *, slots: int = 2, **sections: Any) -> DeploymentConfig:
    """A deployment whose every path is below `directory`, with an empty model directory."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": "test"}))
    return parse_config(
        {
            "deployment": "test",
            "model": {"path": str(model), "name": "test"},
            "scale": {"initial_ranks": 1, "max_ranks": slots},
            "snapshot": {"catalog": str(directory / "images")},
            "run_dir": str(directory / "run"),
            **sections,
        }
    )


def standin_argv(*flags: str) -> Any:
    """An `engine_argv` that starts the stand-in engine with `flags`."""

    def argv(config: DeploymentConfig, slot: int) -> list[str]:
        script = str(Path(standin_engine.__file__).resolve())
        return [sys.executable, script, str(config.control_dir(slot)), *flags]

    return argv
