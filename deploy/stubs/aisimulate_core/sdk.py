"""The two names that dynamo.planner imports at start-up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class ForwardPassPerfModelConfig:
    """Identifies a performance model; only carried about."""

    model: str = ""
    backend: str = ""
    system: str = ""
    worker_type: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class RustForwardPassPerfModel:
    """A performance model that there never is."""

    @classmethod
    def best_available(cls, config: ForwardPassPerfModelConfig) -> RustForwardPassPerfModel:
        raise RuntimeError("aisimulate_core is not installed: no performance model")
