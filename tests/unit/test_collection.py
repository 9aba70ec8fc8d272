"""Every test file is collected, whatever plugins its environment brings."""

from __future__ import annotations

from typing import Any

import pytest


def test_no_plugin_leaves_files_out(pytestconfig: pytest.Config) -> None:
    """Those of ai-dynamo left out every test_vllm_*.py, 26 files, where vLLM is not installed."""
    hooks: list[Any] = pytestconfig.pluginmanager.hook.pytest_ignore_collect.get_hookimpls()
    plugins = {hook.function.__module__.partition(".")[0] for hook in hooks}
    assert plugins <= {"_pytest", "_hypothesis_pytestplugin"}  # that one: its own database
