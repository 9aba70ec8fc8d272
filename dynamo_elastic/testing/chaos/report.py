"""The report: one JSON, and a table of failpoints and faults that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_report(verdicts: Sequence[dict[str, Any]]) -> list[Path]:
    raise NotImplementedError
