"""Our routes in vLLM 0.33's own router and middleware, in .venv-vllm-elastic: prints what each
answers, as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.elastic_ep import api_router, middleware

from dynamo_elastic.engine.vllm.v0_33 import routes
from dynamo_elastic.errors import EngineError

SAID: list[str] = []


class Engine:
    """An AsyncLLM whose coordinator fails as it is told to."""

    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(external_eep_coordinator=self)
        self.fault = ""

    async def attach(self, place: dict[str, Any]) -> dict[str, float]:
        if self.fault:
            raise EngineError(self.fault)
        SAID.append(f"at {place}")
        return {"handshake": 0.1}

    def tell_failure(self, reason: str) -> None:
        SAID.append(reason)

    async def collective_rpc(self, method: str, timeout: float) -> list[Any]:
        return [{"method": method}]


def main() -> None:
    routes.install()
    routes.install()
    app = FastAPI()
    app.add_middleware(middleware.ScalingMiddleware)
    api_router.attach_router(app)
    engine = Engine()
    app.state.engine_client = engine
    middleware.set_elastic_ep_rank_retired(True)
    client = TestClient(app)

    def post(path: str, **body: Any) -> list[Any]:
        answer = client.post(path, json=body)
        return [answer.status_code, answer.json()]

    found = {
        "attach": post(routes.ATTACH, data_parallel_rank=2),
        "attach nowhere": post(routes.ATTACH, rank=2),
        "facts": post(routes.FACTS),
        "fail": post(routes.FAIL, reason="a joiner ended"),
        "fail without a reason": post(routes.FAIL)[0],
        "scale": post("/scale_elastic_ep", new_data_parallel_size=2)[0],
    }
    engine.fault = "rank 1 is in a group"
    found["attach twice"] = post(routes.ATTACH)[0]
    engine.fault = "rank 1 did not join: no weights came"
    found["attach fails"] = post(routes.ATTACH)
    print(json.dumps(found | {"said": SAID, "routes": len(api_router.router.routes)}))  # noqa: T201


if __name__ == "__main__":
    main()
