"""What vLLM's engine core puts out, parted by whom it is for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TO_COORDINATOR = -1
"""Index that vLLM gives outputs which are for the DP coordinator."""


def divert(put: Callable[[Any], None], to_coordinator: Callable[[Any], None]) -> Any:
    """In the place of `put` of vLLM's output queue, whose items are an index and outputs; or one
    word of bytes, that the engine core is dead, which is for everybody who waits at the queue."""

    def diverted(item: Any) -> None:
        if isinstance(item, tuple) and item[0] == TO_COORDINATOR:
            to_coordinator(item[1])
        else:
            put(item)

    return diverted
