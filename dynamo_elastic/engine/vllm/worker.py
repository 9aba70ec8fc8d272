"""Our calls in vLLM's worker process, through its --worker-extension-cls."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.vllm.release import release_tcp

EXTENSION = f"{__name__}.ElasticWorkerExtension"


class ElasticWorkerExtension:
    """Mixed into vLLM's worker class; called by name with collective_rpc()."""

    def elastic_release(self) -> int:
        """The worker holds nothing that an image must not hold."""
        return release_tcp()

    def elastic_attach(self, attach: dict[str, Any]) -> None:
        """The worker has the identity of `attach`: log, environment, random state."""
        renew(msgspec.convert(attach, Attach))
