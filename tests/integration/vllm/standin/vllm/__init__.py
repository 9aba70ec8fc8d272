"""Stands in for vLLM, as far as the front end of a rank that boots without a group needs it."""

from __future__ import annotations

from types import SimpleNamespace as SamplingParams

__all__ = ["SamplingParams"]
