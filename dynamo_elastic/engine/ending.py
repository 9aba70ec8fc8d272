"""How the process of an engine ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NoReturn

from dynamo_elastic.errors import ElasticError

_log = logging.getLogger(__name__)


def until_it_ends(live: Callable[[], None]) -> NoReturn:
    """All of this process from here on: `live` until it is killed. The one place that catches all
    errors: whatever goes wrong is in the log, and the end of the process."""
    try:
        live()
    except ElasticError as exc:
        _log.error("engine ends: %s", exc)
    except Exception:  # noqa: BLE001 - nobody else is there to say what happened
        _log.exception("engine ends: a fault of its own")
    # Threads of NIXL, of vLLM and of Dynamo's runtime would keep a normal exit waiting.
    logging.shutdown()
    os._exit(1)
