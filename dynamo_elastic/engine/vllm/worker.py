"""Our calls in vLLM's worker process, through its --worker-extension-cls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dynamo_elastic.comm.ucx_namespaces import correct_namespaces
from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.renew import renew
from dynamo_elastic.engine.vllm.release import release_process, release_tcp

EXTENSION = f"{__name__}.ElasticWorkerExtension"


class ElasticWorkerExtension:
    """Mixed into vLLM's worker class; called by name with collective_rpc()."""

    distributed_init_method: str
    """Of vLLM's worker."""

    def elastic_release(self) -> int:
        """The worker holds nothing that an image must not hold; returns how many sockets it had.
        They are those of its process groups, which have no other member."""
        scheme, _, path = self.distributed_init_method.partition("://")
        if scheme == "file":
            Path(path).unlink(missing_ok=True)
        release_process()
        return release_tcp()

    def elastic_attach(self, attach: dict[str, Any]) -> None:
        """The worker has the identity of `attach`: log, environment, random state, and what UCX
        believes of its namespaces, before anything of UCX is made in this life."""
        renew(msgspec.convert(attach, Attach))
        correct_namespaces()
