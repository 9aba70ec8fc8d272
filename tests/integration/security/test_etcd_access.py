"""etcd over TLS both ways, with users: who does not belong is told so, and does nothing.

The users and roles are those of docs/security.md, made by its own commands.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from etcd3 import etcdrpc as rpc
from etcd3.etcdrpc import auth_pb2

from dynamo_elastic.config import parse_config
from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.etcd_access import EtcdAccess
from dynamo_elastic.coordinator.main_loop import Coordinator, Deployment
from dynamo_elastic.coordinator.records import Keys
from dynamo_elastic.coordinator.session import Session
from dynamo_elastic.coordinator.store import DeletePrefix, Guard, Put
from dynamo_elastic.coordinator.targets import request_scale, wait_outcome
from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.errors import ConfigError, StoreRefused
from dynamo_elastic.phases import Phase
from dynamo_elastic.testing.certificates import Authority, Pair
from dynamo_elastic.testing.coordination import CONFIG, SHAPE, World
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_missing, etcd_process, free_port
from dynamo_elastic.testing.participants import FakeShell, running
from dynamo_elastic.testing.served import served
from dynamo_elastic.types import Epoch, OperationId, WorkerId

pytestmark = pytest.mark.etcd

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
KEYS = Keys("moe")
PASSWORD = "CHANGE-ME"
TIMEOUT_S = 30.0
TYPES = {"read": auth_pb2.Permission.READ, "readwrite": auth_pb2.Permission.READWRITE}


@dataclass(frozen=True)
class Site:
    """A running etcd, its authority, and a directory for passwords."""

    etcd: EtcdProcess
    authority: Authority
    directory: Path

    def access(self, name: str, *, password: str | None = None, **more: Any) -> EtcdAccess:
        """Of a client whose certificate says `name`; with a password it is that user, too."""
        pair: Pair = self.authority.issue(name, **more)
        access = EtcdAccess(self.authority.ca_file, pair.cert, pair.key)
        if password is None:
            return access
        file = self.directory / f"{more.get('file', name)}.password"
        file.touch(mode=0o600)
        file.write_text(f"{password}\n")
        return replace(access, user=name, password_file=file)

    def store(self, access: EtcdAccess) -> EtcdStore:
        return EtcdStore([self.etcd.url], access, timeout_s=2.0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With the users of docs/security.md, and authentication on."""
    if etcd_missing():
        pytest.skip(etcd_missing())
    directory = tmp_path_factory.mktemp("etcd")
    authority = Authority(directory / "pki")
    etcd = EtcdProcess(directory, ca_file=authority.ca_file, server=authority.issue("server"))
    with etcd_process(directory, etcd):
        found = Site(etcd, authority, directory)
        assert asyncio.run(run_page(found)) > 20
        yield found


async def run_page(site: Site) -> int:
    """Run the page's etcdctl commands, over gRPC; returns how many there are."""
    admin, ca = site.authority.issue("root"), site.authority.ca_file
    tls = grpc.ssl_channel_credentials(
        ca.read_bytes(), admin.key.read_bytes(), admin.cert.read_bytes()
    )
    target = site.etcd.url.removeprefix("https://")
    lines = [
        shlex.split(line)[1:]
        for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("etcdctl ")
    ]
    async with grpc.aio.secure_channel(target, tls) as channel:
        stub = rpc.AuthStub(channel)
        for words in lines:
            call, request = admin_request(stub, words)
            await call(request, timeout=TIMEOUT_S)
    return len(lines)


def admin_request(stub: Any, words: list[str]) -> tuple[Any, Any]:
    """What etcdctl would send."""
    match words:
        case ["role", "add", role]:
            return stub.RoleAdd, rpc.AuthRoleAddRequest(name=role)
        case ["role", "grant-permission", role, *flags, kind, key] if flags in (
            [],
            ["--prefix=true"],
        ):
            end = key[:-1] + chr(ord(key[-1]) + 1) if flags else ""
            permission = auth_pb2.Permission(
                permType=TYPES[kind], key=key.encode(), range_end=end.encode()
            )
            request = rpc.AuthRoleGrantPermissionRequest(name=role, perm=permission)
            return stub.RoleGrantPermission, request
        case ["user", "add", user]:
            name, _, password = user.partition(":")
            return stub.UserAdd, rpc.AuthUserAddRequest(name=name, password=password)
        case ["user", "grant-role", user, role]:
            return stub.UserGrantRole, rpc.AuthUserGrantRoleRequest(user=user, role=role)
        case ["auth", "enable"]:
            return stub.AuthEnable, rpc.AuthEnableRequest()
    raise AssertionError(f"what is etcdctl {' '.join(words)}?")


async def refusal(store: EtcdStore) -> str:
    """What a read and a write are refused with, within the store's own deadlines."""
    began_s = time.monotonic()
    with pytest.raises(StoreRefused) as read:
        await store.get(KEYS.leader)
    with pytest.raises(StoreRefused):
        await store.txn([], [Put(KEYS.leader, b"mine")])
    assert time.monotonic() - began_s < 6.0
    await store.close()
    return str(read.value)


@pytest.mark.parametrize("password", [None, PASSWORD])
def test_a_user_with_certificate_or_password_does_its_work(
    site: Site, password: str | None
) -> None:
    async def main() -> None:
        store = site.store(site.access("coordinator", password=password))
        key = f"{KEYS.prefix}a"
        session = await Session.open(store, 2)
        async with store.watch(KEYS.prefix) as watch:
            revision = await store.txn([], [Put(key, b"1", session.lease)])
            change = await anext(aiter(watch))
            assert (change.key, change.mod_revision) == (key, revision)
        await store.keep_alive(session.lease)
        await session.close()
        assert await store.get(key) is None
        await store.close()

    asyncio.run(main())


def test_an_etcd_of_another_authority_is_not_trusted(site: Site, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    access = replace(site.access("coordinator"), ca_file=stranger.ca_file)
    said = asyncio.run(refusal(site.store(access)))
    assert "is not trusted" in said
    assert f"etcd.ca_file (now {stranger.ca_file})" in said


def test_without_a_certificate_nobody_gets_in(site: Site) -> None:
    access = EtcdAccess(site.authority.ca_file)
    said = asyncio.run(refusal(site.store(access)))
    assert "wants a client certificate" in said
    assert "etcd.cert_file and etcd.key_file" in said


def test_a_certificate_of_another_authority_does_not_get_in(site: Site, tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("coordinator")
    access = EtcdAccess(site.authority.ca_file, pair.cert, pair.key)
    said = asyncio.run(refusal(site.store(access)))
    assert f"does not take {pair.cert}" in said


def test_a_certificate_that_names_no_user_does_nothing(site: Site) -> None:
    assert "permission denied" in asyncio.run(refusal(site.store(site.access("nobody"))))


def test_an_expired_certificate_is_named_before_etcd_is_asked(site: Site) -> None:
    access = site.access("coordinator", file="expired", valid_for=-timedelta(hours=1))
    with pytest.raises(ConfigError, match=r"etcd\.cert_file: .*expired\.pem has expired on"):
        site.store(access)


def test_an_etcd_whose_certificate_has_expired_is_not_trusted(site: Site, tmp_path: Path) -> None:
    old = site.authority.issue("server", file="old", valid_for=-timedelta(hours=1))
    etcd = EtcdProcess(tmp_path, ca_file=site.authority.ca_file, server=old)
    with etcd_process(tmp_path, etcd):
        store = EtcdStore([etcd.url], site.access("coordinator"), timeout_s=2.0)
        assert "certificate has expired" in asyncio.run(refusal(store))


def test_a_wrong_password_is_refused(site: Site) -> None:
    said = asyncio.run(refusal(site.store(site.access("worker", password="guess"))))
    assert "check etcd.user and etcd.password_file" in said
    assert "guess" not in said


def test_a_password_for_an_etcd_without_users_is_refused(tmp_path: Path, site: Site) -> None:
    """Whoever sets one expects to be alone there."""
    with etcd_process(tmp_path) as etcd:
        access = replace(site.access("worker", password=PASSWORD), ca_file=None)
        said = asyncio.run(refusal(EtcdStore([etcd.url], access, timeout_s=2.0)))
        assert "authentication is not enabled" in said


def test_a_token_that_etcd_has_forgotten_is_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    server = authority.issue("server")
    etcd = EtcdProcess(tmp_path, ca_file=authority.ca_file, server=server)
    with etcd_process(tmp_path, etcd):
        site = Site(etcd, authority, tmp_path)
        asyncio.run(run_page(site))

        async def main() -> None:
            store = site.store(site.access("coordinator", password=PASSWORD))
            await store.txn([], [Put(KEYS.leader, b"1")])
            etcd.kill()  # tokens are in its memory alone
            etcd.start()
            for _ in range(20):
                found = await store.get(KEYS.leader)
                assert found is not None
            await store.txn([], [Put(KEYS.leader, b"2")])
            async with store.watch(KEYS.prefix) as watch:
                assert [v.value for v in watch.snapshot] == [b"2"]
            await store.close()

        asyncio.run(main())


def test_a_renewed_certificate_is_taken_when_a_connection_is_made_anew(
    tmp_path: Path, site: Site
) -> None:
    """The old one had been signed by an authority that is not known any more."""
    old = Authority(tmp_path / "old", "ca").issue("coordinator")
    access = EtcdAccess(site.authority.ca_file, old.cert, old.key)

    async def main() -> None:
        store = site.store(access)
        with pytest.raises(StoreRefused):
            await store.get(KEYS.leader)
        new = site.authority.issue("coordinator")
        old.cert.write_bytes(new.cert.read_bytes())
        old.key.write_bytes(new.key.read_bytes())
        await store.get(KEYS.leader)
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "mode"), [("key_file", 0o640), ("password_file", 0o604)])
def test_a_secret_that_others_can_read_is_refused(site: Site, name: str, mode: int) -> None:
    access = site.access("worker", password=PASSWORD, file=f"open-{name}")
    getattr(access, name).chmod(mode)
    with pytest.raises(ConfigError, match=rf"etcd\.{name}: others may read .*chmod 600"):
        site.store(access)


def test_a_worker_can_not_write_what_is_the_coordinators(site: Site) -> None:
    async def main() -> None:
        store = site.store(site.access("worker", password=PASSWORD))
        await store.txn([Guard(KEYS.topology, 0)], [Put(KEYS.target, b"wish")])
        for key in (KEYS.topology, KEYS.operation, KEYS.leader, f"{KEYS.commands}slot0", "/other"):
            with pytest.raises(StoreRefused, match="permission denied; grant its role"):
                await store.txn([], [Put(key, b"forged")])
        with pytest.raises(StoreRefused):
            await store.txn([], [DeletePrefix(KEYS.prefix)])
        with pytest.raises(StoreRefused):
            async with store.watch("/other/"):
                pass
        await store.close()
        admin = site.store(site.access("coordinator"))
        await admin.txn([], [DeletePrefix(KEYS.prefix)])
        await admin.close()

    asyncio.run(main())


def test_a_worker_may_write_all_that_a_shell_writes(site: Site) -> None:
    me, operation = WorkerId("slot0"), OperationId("up-1")
    keys = (
        KEYS.member(me),
        KEYS.ack(me),
        KEYS.endpoint(Epoch(1), me),
        KEYS.traffic(operation, me),
        "v1/mdc/dynamo-moe/backend/generate/1f",
    )

    async def main() -> None:
        store = site.store(site.access("worker", password=PASSWORD))
        lease = await store.grant_lease(60)
        await store.txn([], [Put(key, b"x", lease) for key in keys])
        # As one who takes away what a shell that is gone has left in Dynamo.
        await store.revoke_lease(lease)
        assert [await store.get(key) for key in keys] == [None] * len(keys)
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "flags"),
    [("nobody", ()), ("", ("--client-cert-auth=false", "--trusted-ca-file="))],
    ids=["users", "TLS"],
)
def test_without_each_of_these_guards_the_refused_get_in(
    tmp_path: Path, name: str, flags: tuple[str, ...]
) -> None:
    """It is etcd's users, and its wish for certificates, that keep them out above."""
    authority = Authority(tmp_path / "pki")
    server = authority.issue("server")
    etcd = EtcdProcess(tmp_path, ca_file=authority.ca_file, server=server, more=flags)
    site = Site(etcd, authority, tmp_path)
    with etcd_process(tmp_path, etcd):

        async def main() -> None:
            store = site.store(site.access(name) if name else EtcdAccess(authority.ca_file))
            await store.txn([], [Put(KEYS.topology, b"forged")])
            await store.close()

        asyncio.run(main())


def test_a_whole_scale_operation_with_the_roles_of_the_page(site: Site) -> None:
    async def main() -> None:
        stores = {
            name: site.store(site.access(name, password=PASSWORD))
            for name in ("coordinator", "worker", "cli")
        }
        shells = [FakeShell(stores["worker"], KEYS, slot) for slot in range(4)]
        async with running(shells) as listed:
            here = World(stores["cli"], listed, KEYS)
            deployment = Deployment(KEYS, CONFIG, SHAPE)
            leader = Coordinator(stores["coordinator"], deployment, "leader")
            task = asyncio.create_task(leader.run())
            await here.until(2, timeout_s=TIMEOUT_S)
            for ranks in (4, 3):
                asked = await request_scale(stores["cli"], KEYS, ranks, "cli")
                await wait_outcome(stores["cli"], KEYS, asked, timeout_s=TIMEOUT_S)
                status = await here.until(ranks, timeout_s=TIMEOUT_S)
                assert status.last is not None
                assert status.last.phase is Phase.DONE
            assert await here.faults() == []
            task.cancel()
            await asyncio.wait({task})
        for store in stores.values():
            await store.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.dynamo
def test_a_whole_deployment_on_it(site: Site, tmp_path: Path) -> None:
    """Dynamo's frontend and instances, too: its runtime goes by the certificate alone."""
    access = site.access("serve")
    write_model(tmp_path / "model")
    config = parse_config(
        {
            "deployment": KEYS.deployment,
            "namespace": "dynamo-moe",
            "model": {"path": str(tmp_path / "model"), "name": "test"},
            "engine": {"slots_per_rank": 16},
            "scale": {"initial_ranks": 1, "max_ranks": 2},
            "snapshot": {"enabled": False},
            "etcd": {"start": False, "endpoints": [site.etcd.url], **access.to_json()},
            "frontend": {"port": free_port()},
            "planner": {"enabled": False},
            "run_dir": str(tmp_path / "run"),
        }
    )
    with served(config, tmp_path) as deployment:
        grown = deployment.cli("scale", "2")
        assert grown.returncode == 0, grown.stderr
        assert deployment.status().width == 2
        request = urllib.request.Request(
            f"{deployment.url}/v1/completions",
            json.dumps({"model": "test", "prompt": "jam fam", "max_tokens": 4}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            assert json.load(response)["choices"][0]["text"]

        stranger = config.model_copy(
            update={"etcd": config.etcd.model_copy(update={"cert_file": None, "key_file": None})}
        )
        deployment.file.write_text(stranger.model_dump_json())
        refused = deployment.cli("status")
        assert refused.returncode == 1
        assert "wants a client certificate" in refused.stderr
