"""What Dynamo's worker needs of vLLM and transformers, and one of the tried releases lacks.

Called in every process of an engine before the first import of dynamo.vllm.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

_IMAGE_MODULE = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_ZMQ_ADDRESSES = "get_engine_zmq_addresses"


def apply_shims() -> tuple[str, ...]:
    """dynamo.vllm can be imported; returns what had to be done for it. Idempotent."""
    done = []
    if _IMAGE_MODULE not in sys.modules and importlib.util.find_spec("torchvision") is None:
        # Without torchvision transformers can't import it; Dynamo imports two names of it, for
        # requests with images.
        sys.modules[_IMAGE_MODULE] = _stand_in(_IMAGE_MODULE, "torchvision is not installed")
        done.append(_IMAGE_MODULE)
    from vllm.v1.engine import utils

    if not hasattr(utils, _ZMQ_ADDRESSES):
        # Gone in vLLM 0.32. Dynamo 1.6.1 calls it for --embedding-worker-processes alone.
        setattr(utils, _ZMQ_ADDRESSES, _refusal("--embedding-worker-processes is not supported"))
        done.append(f"{utils.__name__}.{_ZMQ_ADDRESSES}")
    return tuple(done)


def _refusal(why: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(why)

    return refuse


def _stand_in(name: str, why: str) -> types.ModuleType:
    module = types.ModuleType(name, why)
    refuse = _refusal(why)
    module.smart_resize = refuse  # type: ignore[attr-defined]
    module.Qwen2VLImageProcessor = type("Qwen2VLImageProcessor", (), {"__init__": refuse})  # type: ignore[attr-defined]
    return module
