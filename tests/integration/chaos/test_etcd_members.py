"""Members in namespaces: who is cut off, who is not, and that a site has one owner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.errors import ResourceMissing, StoreError
from dynamo_elastic.testing.chaos.etcd_members import SITES, EtcdMembers
from dynamo_elastic.testing.chaos.world import missing_tools

pytestmark = [
    pytest.mark.root,
    pytest.mark.etcd,
    pytest.mark.skipif(bool(missing_tools()), reason=missing_tools()),
]

SITE = SITES - 2
ONE, OTHER = 1, 2


@pytest.fixture
def members(tmp_path: Path) -> Iterator[EtcdMembers]:
    etcd = EtcdMembers(tmp_path, 1, (ONE, OTHER), site=SITE)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.stop()


def writes(etcd: EtcdMembers, client: int) -> bool:
    async def write() -> bool:
        store = EtcdStore(etcd.urls(client), timeout_s=1.0)
        try:
            await store.txn([], [Put("/x", b"1")])
        except StoreError:
            return False
        finally:
            await store.close()
        return True

    return asyncio.run(write())


def test_one_client_is_cut_off_and_the_other_is_not(members: EtcdMembers) -> None:
    assert writes(members, ONE)
    members.partition(ONE)
    assert not writes(members, ONE)
    assert writes(members, OTHER)
    members.heal()
    assert writes(members, ONE)


def test_a_member_that_was_killed_and_unplugged_comes_back(members: EtcdMembers) -> None:
    assert writes(members, ONE)
    only = members.leader()
    members.unplug(only)
    members.kill(only)
    assert not writes(members, ONE)
    members.revive()
    members.wait_healthy()
    assert writes(members, ONE)


def test_a_site_has_one_owner(members: EtcdMembers, tmp_path: Path) -> None:
    second = EtcdMembers(tmp_path / "second", 1, (ONE,), site=SITE)
    with pytest.raises(ResourceMissing, match="in use"):
        second.start()
    second.stop()
    assert writes(members, ONE)
