"""What the world may hand us, as functions of bytes: each must answer or raise one of our typed
errors, soon, and change nothing if it refuses. `make test` feeds them with hypothesis, `make fuzz`
with atheris, which looks for new paths through our code.

A target raises AssertionError, or whatever got away, when that does not hold.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.config import SETTINGS, DeploymentConfig
from dynamo_elastic.config_resolve import resolve
from dynamo_elastic.config_sources import from_environment, from_flags, from_yaml
from dynamo_elastic.coordinator.records import (
    AckRecord,
    CapacityRecord,
    CommandRecord,
    EndpointRecord,
    Keys,
    MemberRecord,
    OperationRecord,
    RecordError,
    TargetOutcome,
    TargetRecord,
    WarningRecord,
    decode,
    plain,
)
from dynamo_elastic.coordinator.status import status_of
from dynamo_elastic.coordinator.store import Versioned
from dynamo_elastic.dynamo.decisions import PlannerKeys, pending_decision
from dynamo_elastic.engine.rpc import handlers
from dynamo_elastic.errors import ConfigError, SnapshotError
from dynamo_elastic.ipc import RpcServer
from dynamo_elastic.snapshot.archive import import_image
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu_images import PROCESSES, first_number, own_pages, own_pids
from dynamo_elastic.snapshot.manifest import decode as decode_manifest
from dynamo_elastic.snapshot.process import HostMemory
from dynamo_elastic.snapshot.sizes import image_sizes
from dynamo_elastic.testing import virtual_time
from dynamo_elastic.testing.engine import FakeEngine
from dynamo_elastic.testing.store import FakeStore
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import WorkerId
from dynamo_elastic.worker.control import ElasticControl

RECORDS: tuple[type[Any], ...] = (
    *(AckRecord, CapacityRecord, CommandRecord, EndpointRecord, MemberRecord, OperationRecord),
    *(TargetOutcome, TargetRecord, Topology, WarningRecord),
)
KEYS = Keys("fuzz")
TOKEN = "token"
TIMEOUT_S = 5.0


def config(data: bytes) -> None:
    """A configuration file, and the variables and flags around it."""
    text = data.decode(errors="replace")
    lines = [line for line in text.splitlines() if "=" in line]
    environ = {f"DYN_ELASTIC_{n}": v for n, _, v in (line.partition("=") for line in lines)}
    for layers in (
        lambda: [from_yaml(text, "fuzz.yaml", SETTINGS)],
        lambda: [from_environment(environ, SETTINGS)],
        lambda: [from_flags([f"--elastic-{line}" for line in lines], SETTINGS)[0]],
    ):
        with suppress(ConfigError):
            resolve(DeploymentConfig, layers(), SETTINGS)


def manifest(data: bytes) -> None:
    with suppress(SnapshotError):
        decode_manifest(data, "fuzz")


def record(data: bytes) -> None:
    """A value in etcd under any key of ours."""
    for kind in RECORDS:
        with suppress(RecordError):
            decode(kind, data)
    plain(data)
    keys = (KEYS.topology, KEYS.target, KEYS.last, KEYS.member(WorkerId("slot0")), KEYS.epoch)
    for key in keys:
        with suppress(RecordError):
            status_of([Versioned(key, data, 1, 1)], KEYS)


def planner(data: bytes) -> None:
    """What a planner, or whoever has its place, writes."""
    keys = PlannerKeys("fuzz")
    ranks, _, rest = data.partition(b"\0")
    decision, _, acknowledged = rest.partition(b"\0")
    values = {keys.ranks: ranks, keys.decision: decision, keys.acknowledged: acknowledged}
    stored = {k: Versioned(k, v, 1, n) for n, (k, v) in enumerate(values.items(), 1)}
    pending_decision(stored, keys)
    pending_decision({k: v for k, v in stored.items() if k != keys.acknowledged}, keys)


def control(data: bytes) -> None:
    """A body that Dynamo's system port hands to a control route: an object of whatever is in it."""
    with suppress(ValueError, RecursionError):
        body = json.loads(data)
        if isinstance(body, dict):
            for name in ("elastic_status", "scale_elastic", "park"):
                virtual_time.run(_control(name, body))


async def _control(name: str, body: dict[str, Any]) -> None:
    store, me = FakeStore(), WorkerId("slot0")
    routes = ElasticControl(store, KEYS, me, operation_timeout_s=1.0, token=TOKEN).routes()
    answer = await asyncio.wait_for(routes[name]({**body, "token": TOKEN}), 2 * TIMEOUT_S)
    json.dumps(answer)
    if answer["status"] == "error":
        _must(not store.data, f"refused, and stored all the same: {answer}")


def agent_call(data: bytes) -> None:
    """A call on the agent's socket, its body as it is."""
    asyncio.run(_call(_agent_handlers(), data))


def engine_call(data: bytes) -> None:
    """A call on an engine's socket."""
    asyncio.run(_call(handlers(FakeEngine(WorkerId("slot0"))), data))


async def _call(calls: Mapping[str, Any], data: bytes) -> None:
    """The first byte says which of `calls`; the server must answer, and answer again."""
    names = sorted(calls)
    name = names[data[0] % len(names)] if data else names[0]
    with tempfile.TemporaryDirectory(prefix="fz-") as directory:
        path = Path(directory) / "s"
        server = RpcServer(path, calls)
        await server.start()
        try:
            connector = aiohttp.UnixConnector(path=str(path))
            async with aiohttp.ClientSession(connector=connector) as session:
                for body in (data[1:], b"{}"):
                    async with asyncio.timeout(TIMEOUT_S):
                        answer = await session.post(f"http://unix/call/{name}", data=body)
                        said = await answer.json()
                    _must(answer.status in (200, 400, 404, 409, 413), f"{answer.status}: {said}")
        finally:
            await server.close()


@cache
def _agent_handlers() -> Mapping[str, Any]:
    """The agent's own reading of its calls, in front of slots that do nothing."""
    from dynamo_elastic.agent.server import AgentServer
    from dynamo_elastic.testing.deployments import deployment, standin_argv

    directory = Path(tempfile.mkdtemp(prefix="fz-"))
    server = AgentServer(deployment(directory), NoImages("fuzz"), standin_argv())
    server._opened = (None, _NoSlots())  # type: ignore[assignment]
    calls = dict(server._server._calls)
    for name in ("stop_all", "drain", "undrain", "status", "slots"):
        calls.pop(name, None)
    return calls


class _NoSlots:
    """Takes what the agent has read, and checks that it can be used."""

    async def start(self, request: Any) -> Any:
        _must(all(isinstance(t, Tier) for t in request.tiers), "tiers")
        _must(request.began <= request.deadline < request.began + 1e7, "a deadline that is none")
        raise ConfigError(["fuzz"])

    async def stop(self, number: int, incarnation: str) -> None:
        _must(isinstance(number, int), "number")

    async def park(self, number: int, incarnation: str, *, timeout_s: float) -> str:
        _must(0 <= timeout_s < 1e7, "a deadline that is none")
        return ""

    async def evict(self, number: int, why: Any) -> bool:
        return False

    async def evict_all(self, why: Any) -> tuple[int, ...]:
        return ()


def inventory(data: bytes) -> None:
    """CRIU's own files in an image: process tree, index of pages, sizes."""
    with tempfile.TemporaryDirectory(prefix="fz-") as made:
        directory = Path(made)
        for name in (PROCESSES, "pagemap-1.img", "pagemap-shmem-1.img"):
            (directory / name).write_bytes(data)
        (directory / "pages-1.img").write_bytes(bytes(64))
        for read in (
            lambda: first_number(directory / PROCESSES),
            lambda: own_pages(directory, 1),
            lambda: image_sizes(directory, HostMemory(1, 1)),
            lambda: own_pids(directory),
        ):
            with suppress(SnapshotError):
                read()


def archive(data: bytes) -> None:
    """A file that is to be imported; a refusal leaves the catalog as it was."""
    with tempfile.TemporaryDirectory(prefix="fz-") as made:
        source = Path(made) / "image.tar"
        source.touch(0o600)
        source.write_bytes(data)
        catalog = Catalog(Path(made) / "images")
        with suppress(SnapshotError):
            import_image(catalog, source)
        _must(catalog.partials() == (), "a part of an image is left")


def http(data: bytes) -> None:
    """A request to a coordinator's HTTP API: method and path in its first line, then the body."""
    asyncio.run(_http(data))


async def _http(data: bytes) -> None:
    from aiohttp.test_utils import TestServer

    from dynamo_elastic.config_sections import ApiConfig, ScaleConfig
    from dynamo_elastic.coordinator.api import ApiServer
    from dynamo_elastic.report.history import History

    line, _, body = data.partition(b"\n")
    store = FakeStore()
    api = ApiServer(
        store,
        KEYS,
        ApiConfig(),
        ScaleConfig(initial_ranks=1, max_ranks=1),
        "fuzz",
        token=TOKEN,
        history=History(Path("nothing is kept"), keep=1),
    )
    query = line.decode("ascii", errors="ignore").strip()
    async with TestServer(api.app()) as server, aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        for path in ("/v1/target", "/v1/target?wait_s=0", f"/v1/target?{query}"):
            with suppress(ValueError, aiohttp.InvalidURL):
                async with asyncio.timeout(2 * TIMEOUT_S):
                    answer = await session.put(server.make_url(path), data=body, headers=headers)
                _must(answer.status < 500 or answer.status == 503, f"{answer.status}")
                if answer.status >= 400:
                    _must(not store.data, "refused, and stored all the same")
                store.data.clear()


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "config": config,
    "manifest": manifest,
    "record": record,
    "planner": planner,
    "control": control,
    "agent_call": agent_call,
    "engine_call": engine_call,
    "inventory": inventory,
    "archive": archive,
    "http": http,
}


def seeds() -> dict[str, list[bytes]]:
    """Something well-formed for each target to begin with."""
    from dynamo_elastic.coordinator.records import encode
    from dynamo_elastic.snapshot.manifest import Manifest
    from dynamo_elastic.snapshot.manifest import encode as encode_manifest
    from dynamo_elastic.testing.snapshots import FINGERPRINT
    from dynamo_elastic.types import Epoch

    image = Manifest("slot0-a", 0, "now", 1000, FINGERPRINT, ())
    yaml = b"deployment: x\nmodel: {path: m, name: n}\nscale: {initial_ranks: 1, max_ranks: 2}\n"
    entry = bytes([8, 1, 16, 2, 32, 6])
    wanted = {"slot": 0, "operation_id": "o", "worker_id": "w", "epoch": 1, "tiers": ["cold"]}
    starts = [
        b"\x02" + json.dumps({**wanted, "timeout_s": timeout_s}).encode()
        for timeout_s in (1, float("nan"), float("inf"), -1)
    ]
    return {
        "config": [yaml, b"DEPLOYMENT=x\nscale-max-ranks=3\n", b"a: &a [*a]"],
        "manifest": [encode_manifest(image), b'{"schema_version": {}}', b'{"schema_version": 5.0}'],
        "record": [
            encode(Topology(Epoch(3))),
            encode(TargetRecord("r", 2, "cli", 0.0)),
            b'{"schema_version":1,"record":{"ranks":1e400}}',
        ],
        "planner": [b"4\x001\x000", b"-1\x00\xff\x00", b"9" * 5000 + b"\x001\x00"],
        "control": [b'{"target": 2}', b'{"target": 1e999}', b'{"target": "2", "request_id": null}'],
        "agent_call": [*starts, b"\x01[]", b"\x01" + b"[" * 2000, b'\x00{"slot": Infinity}'],
        "engine_call": [b'\x0d{"epoch": 1, "rank": 0, "world_size": 1}', b"\x0d[1]", b"\x0d\xff"],
        "inventory": [
            bytes(8) + len(entry).to_bytes(4, "little") + entry,
            bytes(8) + (1 << 20).to_bytes(4, "little") + b"\x08" + b"\xff" * ((1 << 20) - 1),
        ],
        "archive": [_tar(encode_manifest(image))],
        "http": [b'wait_s=1\n{"target": 2}', b'wait_s=nan\n{"target": 2}', b"\n[]"],
    }


def _tar(manifest_bytes: bytes) -> bytes:
    import tarfile

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archived:
        member = tarfile.TarInfo("slot0-a/manifest.json")
        member.size = len(manifest_bytes)
        archived.addfile(member, io.BytesIO(manifest_bytes))
    return file.getvalue()
