"""The HTTP API: what it answers agrees with its OpenAPI document, on a deployment of fakes."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
import yaml

from dynamo_elastic.config_sections import ApiConfig
from dynamo_elastic.coordinator.api import ApiServer
from dynamo_elastic.coordinator.api_models import TargetState
from dynamo_elastic.coordinator.api_routes import ROUTES, Route, openapi
from dynamo_elastic.coordinator.api_views import in_use
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import (
    Keys,
    OutcomeStatus,
    TargetOutcome,
    WarningRecord,
    encode,
)
from dynamo_elastic.coordinator.store import Put, Versioned
from dynamo_elastic.coordinator.targets import request_scale
from dynamo_elastic.errors import ConfigError, StoreUnavailable
from dynamo_elastic.phases import Step
from dynamo_elastic.report.history import History
from dynamo_elastic.testing.certificates import Authority
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World, world
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.etcd_process import free_port
from dynamo_elastic.testing.participants import Misbehaviour, Script
from dynamo_elastic.testing.store import FakeStore

TIMEOUT_S = 30.0
TOKEN = "token-1"
DOCUMENT = openapi()
NO_HISTORY = History(Path("nothing is kept"), keep=1)


@dataclass
class Client:
    """Speaks to one API, and checks every answer against the document."""

    session: aiohttp.ClientSession
    url: str

    async def ask(
        self, method: str, path: str, code: int, *, route: str = "", **more: Any
    ) -> dict[str, Any]:
        async with self.session.request(method, self.url + path, **more) as response:
            body: dict[str, Any] = await response.json()
            assert response.status == code, body
        described = DOCUMENT["paths"][route or path.partition("?")[0]][method.lower()]
        schema = described["responses"][str(code)]["content"]["application/json"]["schema"]
        jsonschema.validate(
            body,
            {**schema, "components": DOCUMENT["components"]},
            jsonschema.Draft202012Validator,
            format_checker=jsonschema.FormatChecker(),
        )
        return body

    async def put(self, code: int, query: str = "", **body: Any) -> dict[str, Any]:
        return await self.ask("PUT", f"/v1/target{query}", code, json=body)

    async def until_reached(self, request_id: str, target: int) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                async with self.session.put(
                    f"{self.url}/v1/target?wait_s=1",
                    json={"target": target, "request_id": request_id},
                ) as response:
                    body: dict[str, Any] = await response.json()
                if response.status == 200:
                    return body
                assert response.status == 202, body
                await asyncio.sleep(0.02)


@asynccontextmanager
async def api(here: World, name: str = "c", **settings: Any) -> AsyncIterator[Client]:
    config = ApiConfig(port=free_port(), **settings)
    server = ApiServer(here.store, here.keys, config, CONFIG, name, token=TOKEN, history=NO_HISTORY)
    await server.start()
    try:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            yield Client(session, f"http://127.0.0.1:{config.port}")
    finally:
        await server.close()


@asynccontextmanager
async def served(shells: int = 4) -> AsyncIterator[tuple[World, Client]]:
    """A booted deployment of fakes, and its API."""
    async with world(FakeStore(), shells) as here:
        leader = Coordinator(here.store, Deployment(here.keys, CONFIG, SHAPE), "leader")
        task = asyncio.create_task(leader.run())
        try:
            await here.until(CONFIG.initial_ranks, timeout_s=TIMEOUT_S)
            async with api(here) as client:
                yield here, client
        finally:
            task.cancel()
            await asyncio.wait({task})


def test_what_is_served_is_what_the_document_says() -> None:
    keys = Keys("test")
    server = ApiServer(FakeStore(), keys, ApiConfig(), CONFIG, "c", token=TOKEN, history=NO_HISTORY)
    app = server.app()
    served_paths = {(r.method.lower(), r.resource.canonical) for r in app.router.routes()}  # type: ignore[union-attr]
    described = {(m, path) for path, ways in DOCUMENT["paths"].items() for m in ways}
    assert served_paths == described == {(r.method, r.path) for r in ROUTES}


def test_the_published_document_is_up_to_date() -> None:
    import dynamo_elastic

    package = Path(dynamo_elastic.__file__).parent
    published = json.loads((package / "schema" / "coordinator.openapi.json").read_text())
    assert published == DOCUMENT, "run: python -m dynamo_elastic.cli.reference"


@asyncio_test
async def test_a_target_is_absolute_and_asking_twice_is_asking_once() -> None:
    async with served() as (here, client):
        first = await client.put(202, target=4, request_id="a", source="keda")
        assert first["state"] == "running"
        again = await client.put(202, target=4, request_id="a", source="keda")
        assert again["operation_id"] == first["operation_id"]
        done = await client.until_reached("a", 4)
        assert (done["state"], done["operation_id"]) == ("reached", first["operation_id"])
        operation = await client.ask(
            "GET", f"/v1/operations/{done['operation_id']}", 200, route="/v1/operations/{id}"
        )
        assert (operation["phase"], operation["done"]) == ("done", True)
        assert (operation["ranks_before"], operation["ranks_after"]) == (2, 4)
        roles = {p["worker"]: (p["role"], p["rank"]) for p in operation["participants"]}
        assert roles["slot0"] == ("retained", 0)
        assert roles["slot3"] == ("joiner", 3)
        before = (await here.status()).last
        assert (await client.put(200, target=4))["state"] == "unchanged"
        assert (await here.status()).last == before, "no operation"


@asyncio_test
async def test_the_documents_example_is_served() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()
    (line,) = [x for x in page.splitlines() if x.startswith("curl ")]
    words = shlex.split(line)
    body = json.loads(words[words.index("-d") + 1])
    async with served() as (here, client):
        assert words[words.index("-X") + 2] == "127.0.0.1:9087/v1/target"
        assert (await client.put(202, **body))["state"] == "running"
        await client.until_reached(body["request_id"], body["target"])
        assert (await here.status()).width == 4
    for route in ROUTES:
        assert f"`{route.method.upper()} {route.path}`" in page
    states = {s for s in re.findall(r"`([a-z]+)`", page) if s in set(TargetState)}
    assert states == set(TargetState)


@asyncio_test
async def test_without_a_name_a_wish_joins_the_same_one() -> None:
    async with served() as (here, client):
        here[2].script = Script({Step.RESTORE: Misbehaviour.LATE})
        first = await client.put(202, target=4)
        second = await client.put(202, target=4)
        assert first["request_id"] == second["request_id"]
        assert (await client.until_reached(first["request_id"], 4))["state"] == "reached"


@asyncio_test
async def test_refused_with_the_reason() -> None:
    async with served() as (here, client):
        before = await here.status()
        refused = await client.put(422, target=9, request_id="a")
        assert refused["state"] == "refused"
        assert "scale.max_ranks is 4" in refused["reason"]
        assert await client.put(422, target=9, request_id="a") == refused
        assert (await here.status()).topology == before.topology
        other = await client.put(400, target=3, request_id="a")
        assert "asked for 9 ranks, not 3" in other["error"]


@asyncio_test
async def test_queued_then_superseded_and_whose_it_is() -> None:
    async with served() as (here, client):
        here[2].script = Script({Step.RESTORE: Misbehaviour.LATE})
        running = await client.put(202, target=4, request_id="a", source="keda", detail="cpu 80 %")
        queued = await client.put(202, target=3, request_id="b")
        assert (queued["state"], queued["operation_id"]) == ("queued", running["operation_id"])
        await request_scale(here.store, here.keys, 2, "planner", detail="decision 17")
        superseded = await client.put(409, target=3, request_id="b")
        assert superseded["reason"].startswith("target 2 by planner decision 17 at ")
        assert " supersedes 3 by api at " in superseded["reason"]
        owner = (await client.ask("GET", "/v1/status", 200))["owner"]
        assert (owner["target"], owner["source"], owner["detail"]) == (2, "planner", "decision 17")
        assert [(e["target"], e["source"]) for e in owner["supersedes"]] == [
            (3, "api"),
            (4, "keda"),
        ]
        await here.until(2, timeout_s=TIMEOUT_S)


@asyncio_test
async def test_a_slot_is_safe_to_delete_only_after_the_commit_that_released_it() -> None:
    async with served() as (here, client):
        assert await deletable(client) == ["slot2", "slot3"]
        await client.put(202, target=4, request_id="up")
        await client.until_reached("up", 4)
        assert await deletable(client) == []
        assert (await client.ask("GET", "/v1/status", 200))["slots_wanted"] == 4
        here[3].script = Script({Step.PARK: Misbehaviour.LATE})
        seen: set[tuple[str, int]] = set()
        await client.put(202, target=2, request_id="down")
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                slots = await deletable(client)
                status = await client.ask("GET", "/v1/status", 200)
                if status["operation"] is None:
                    break
                seen.add((" ".join(slots), status["slots_wanted"]))
        assert seen == {("", 4)}, "while the operation runs nothing may go"
        assert await deletable(client) == ["slot2", "slot3"]
        assert status["slots_wanted"] == 2


async def deletable(client: Client) -> list[str]:
    body = await client.ask("GET", "/v1/safe-to-delete", 200)
    return [slot["worker"] for slot in body["slots"]]


def test_pods_that_keda_deletes_are_never_in_use() -> None:
    """The trigger of examples/keda against the API, its answers put through the autoscaler's
    formula, and the highest pods deleted as a StatefulSet does."""
    example = Path(__file__).parents[3] / "examples" / "keda" / "scaledobject.yaml"
    scaled, _ = yaml.safe_load_all(example.read_text())
    trigger = scaled["spec"]["triggers"][0]["metadata"]
    assert (trigger["authMode"], trigger["targetValue"]) == ("bearer", "1")
    path = "/" + trigger["url"].split("/", 3)[3]
    headers = {"Authorization": f"Bearer {TOKEN}", "User-Agent": "Go-http-client/1.1"}

    @asyncio_test
    async def main() -> None:
        async with served() as (here, _), api(here) as client:

            async def replicas() -> int:
                body = await client.ask("GET", path, 200, headers=headers)
                value: float = body[trigger["valueLocation"]]
                return math.ceil(value / float(trigger["targetValue"]))

            async def until(wanted: int) -> set[int]:
                """The counts that KEDA sees until the width is `wanted` and all is done."""
                seen = set()
                async with asyncio.timeout(TIMEOUT_S):
                    while True:
                        count = await replicas()
                        seen.add(count)
                        status = await here.status()
                        used = [status.members[w].slot for w in in_use(status)]
                        assert wanted == 4 or max(used) < count, "a pod in use would go"
                        if status.width == wanted and status.operation is None:
                            return seen | {await replicas()}

            await request_scale(here.store, here.keys, 4, "planner")
            assert await until(4) <= {2, 4}
            here[3].script = Script({Step.PARK: Misbehaviour.LATE})
            await request_scale(here.store, here.keys, 2, "planner")
            assert await until(2) == {4, 2}
            for slot in range(await replicas(), 4):
                await here[slot].die()
            assert (await here.until(2, timeout_s=TIMEOUT_S)).width == 2

    main()


@asyncio_test
async def test_slots_that_the_target_wants_next_stay() -> None:
    async with world(FakeStore(), 4) as here, api(here) as client:
        await request_scale(here.store, here.keys, 3, "api")
        assert await deletable(client) == ["slot3"]
        body = await client.put(202, "?wait_s=0", target=3)
        assert (body["state"], body["reason"]) == ("accepted", "no coordinator leads")


@asyncio_test
async def test_a_target_that_was_reached_and_lost_again_is_asked_for_anew() -> None:
    async with world(FakeStore(), 0) as here, api(here) as client:
        await request_scale(here.store, here.keys, 4, "api", request_id="a")
        outcome = TargetOutcome("a", 4, OutcomeStatus.REACHED)
        await here.store.txn([], [Put(here.keys.outcome, encode(outcome))])
        answer = await client.put(202, "?wait_s=0", target=4)
        assert answer["state"] == "accepted"
        assert answer["request_id"] != "a"


@asyncio_test
async def test_warnings_and_an_empty_deployment() -> None:
    async with world(FakeStore(), 0) as here, api(here, "me") as client:
        warning = encode(WarningRecord("two planners write", 1.0))
        await here.store.txn([], [Put(here.keys.warning("planner"), warning)])
        status = await client.ask("GET", "/v1/status", 200)
        assert status["warnings"] == {"planner": "two planners write"}
        assert (status["width"], status["owner"], status["answered_by"]) == (0, None, "me")
        route = "/v1/operations/{id}"
        missing = await client.ask("GET", "/v1/operations/x", 404, route=route)
        assert "those are: none" in missing["error"]
        assert await client.ask("GET", "/openapi.json", 200) == DOCUMENT
        await client.ask("GET", "/healthz", 200)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "target: Field required"),
        ({"target": "4"}, "target: Input should be a valid integer"),
        ({"target": True}, "target: Input should be a valid integer"),
        ({"target": -1}, "target: Input should be greater"),
        ({"target": 4, "ranks": 4}, "ranks: Extra inputs"),
        ({"target": 4, "request_id": "a b"}, "request_id: String should match"),
        ({"target": 4, "source": "Planner!"}, "source: String should match"),
        ({"target": 4, "detail": "\x1b[2J"}, "detail: String should match"),
    ],
)
def test_a_bad_body_is_named_and_changes_nothing(body: dict[str, Any], says: str) -> None:
    @asyncio_test
    async def main() -> None:
        async with world(FakeStore(), 0) as here, api(here) as client:
            found = await client.put(400, **body)
            assert found["faults"][0].startswith(says)
            assert await here.store.get(here.keys.target) is None

    main()


@asyncio_test
async def test_other_bad_requests() -> None:
    async with world(FakeStore(), 0) as here, api(here) as client:
        for query in ("?wait_s=-1", "?wait_s=x", "?wait_s=61", "?wait_s=nan"):
            await client.put(400, query, target=2)
        text: Any = {"data": b'{"target": 2}', "headers": {"Content-Type": "text/plain"}}
        await client.ask("PUT", "/v1/target", 400, **text)
        long: Any = {"data": b"x" * 20000, "headers": {"Content-Type": "application/json"}}
        async with client.session.put(f"{client.url}/v1/target", **long) as response:
            assert response.status == 413
        async with client.session.post(f"{client.url}/v1/target", json={}) as response:
            assert response.status == 405
        assert await here.store.get(here.keys.target) is None


GUARDED = [r for r in ROUTES if not r.open]
WRONG = (None, "Bearer token-2", "Bearer token-", TOKEN, f"Basic {TOKEN}", "Bearer", "Bearer \xe9")


@pytest.mark.parametrize("route", GUARDED, ids=lambda r: r.name)
@pytest.mark.parametrize("given", WRONG)
@asyncio_test
async def test_without_the_token_nothing_is_told_or_done(route: Route, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    async with world(FakeStore(), 0) as here, api(here) as client:
        path = route.path.replace("{id}", "x")
        async with (
            aiohttp.ClientSession() as stranger,
            stranger.request(
                route.method, client.url + path, headers=headers, json={"target": 2}
            ) as answer,
        ):
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert await here.store.get(here.keys.target) is None


@asyncio_test
async def test_who_asks_for_health_needs_no_token_and_hears_no_more() -> None:
    async with world(FakeStore(), 0) as here, api(here) as client:
        for path in ("/healthz", "/openapi.json"):
            async with aiohttp.ClientSession() as anybody, anybody.get(client.url + path) as answer:
                assert answer.status == 200
        assert await client.ask("GET", "/healthz", 200) == {"status": "ok"}


@asyncio_test
async def test_over_https(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("coordinator")
    async with world(FakeStore(), 0) as here:
        async with api(here, cert_file=pair.cert, key_file=pair.key) as client:
            url = client.url.replace("http:", "https:")
            trusting = ssl.create_default_context(cafile=authority.ca_file)
            async with client.session.get(f"{url}/v1/status", ssl=trusting) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.session.get(f"{url}/v1/status")
            with pytest.raises(aiohttp.ClientError):
                await client.session.get(f"{client.url}/v1/status")
        pair.key.chmod(0o644)
        with pytest.raises(ConfigError, match=r"coordinator\.api\.key_file: others may read"):
            async with api(here, cert_file=pair.cert, key_file=pair.key):
                pass


@asyncio_test
async def test_a_port_in_use_is_a_clear_error() -> None:
    async with world(FakeStore(), 0) as here, api(here) as client:
        taken = ApiConfig(port=int(client.url.rpartition(":")[2]))
        server = ApiServer(
            here.store, here.keys, taken, CONFIG, "second", token=TOKEN, history=NO_HISTORY
        )
        with pytest.raises(ConfigError, match=r"coordinator\.api\.port: can't listen"):
            await server.start()


@asyncio_test
async def test_without_etcd_every_route_says_so() -> None:
    class Gone(FakeStore):
        async def get(self, key: str) -> Versioned | None:
            raise StoreUnavailable("no answer")

        async def get_prefix(self, prefix: str) -> tuple[Versioned, ...]:
            raise StoreUnavailable("no answer")

    async with world(FakeStore(), 0) as here:
        here.store = Gone()
        async with api(here) as client:
            await client.ask("GET", "/healthz", 503)
            await client.ask("GET", "/v1/status", 503)
            await client.put(503, target=2)


@asyncio_test
async def test_a_damaged_record_is_said() -> None:
    async with world(FakeStore(), 0) as here, api(here) as client:
        await here.store.txn([], [Put(here.keys.target, b"{}")])
        found = await client.ask("GET", "/v1/status", 503)
        assert "TargetRecord has schema version None" in found["error"]


@asyncio_test
async def test_requests_that_wait_do_not_hold_up_the_end() -> None:
    async with world(FakeStore(), 0) as here, aiohttp.ClientSession() as session:
        async with api(here) as client:
            waiting = asyncio.create_task(
                session.put(
                    f"{client.url}/v1/target?wait_s=60",
                    json={"target": 2},
                    headers={"Authorization": f"Bearer {TOKEN}"},
                )
            )
            await asyncio.sleep(0.2)
            began_s = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began_s < 10
        with pytest.raises(aiohttp.ClientError):
            await waiting
