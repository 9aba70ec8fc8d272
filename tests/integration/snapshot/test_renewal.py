"""Real copies of one image: nothing is the same twice that must not be."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.agent.images import Images
from dynamo_elastic.agent.rehearse import running_copy
from dynamo_elastic.engine.renew import RENEWALS
from dynamo_elastic.ipc import RpcClient
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.testing.deployments import deployment, standin_argv
from dynamo_elastic.testing.standin_state import SKIP, STALE_HOST

pytestmark = [pytest.mark.root, pytest.mark.criu]

RENEWED = ("random", "numpy", "torch", "openssl", "uuid1 node", "temporary names", "process key")
CPUINFO = Path("/proc/cpuinfo")
FROM_KERNEL = ("uuid1", "uuid4", "urandom", "secrets")
FIRST = {"TZ": "UTC-1", "TMPDIR": "/var/tmp", "COLOUR": "red"}
SECOND = {"TZ": "UTC-2", "TMPDIR": "/dev/shm", "COLOUR": "blue"}


@dataclass(frozen=True)
class Copies:
    """What the original and its copies said: two as every engine is, two that renewed nothing."""

    original: dict[str, Any]
    renewed: list[dict[str, Any]]
    stale: list[dict[str, Any]]
    logs: list[str]


async def _copy(images: Images, manifest: Manifest, environment: dict[str, str]) -> Any:
    async with running_copy(images, manifest, timeout_s=60, environment=environment) as copy:
        rpc = RpcClient(copy.socket_path)
        try:
            said = await rpc.call("identity", {}, timeout_s=20)
        finally:
            await rpc.close()
        log = copy.socket_path.parent / "engine.log"
        return said, log.read_text() if log.exists() else ""


@pytest.fixture(scope="module")
def copies() -> Iterator[Copies]:
    with tempfile.TemporaryDirectory(prefix="de-") as directory:
        config = deployment(Path(directory))
        catalog = Catalog(config.snapshot.catalog)
        images = Images(config, Criu.find(), catalog, standin_argv("--torch", "--mb", "1"))
        manifest = images.create(0)
        skip = {SKIP: ",".join(RENEWALS)}
        answers = [
            asyncio.run(_copy(images, manifest, environment))
            for environment in (FIRST, SECOND, skip, skip)
        ]
        said = [answer for answer, _ in answers]
        yield Copies(manifest.engine, said[:2], said[2:], [log for _, log in answers])


@pytest.mark.parametrize("source", [*RENEWED, *FROM_KERNEL])
def test_two_copies_and_the_original_draw_apart(copies: Copies, source: str) -> None:
    drawn = {said["draws"][source] for said in (copies.original, *copies.renewed)}
    assert len(drawn) == 3
    assert "" not in drawn


@pytest.mark.parametrize("source", RENEWED)
def test_without_renewal_copies_would_draw_the_same(copies: Copies, source: str) -> None:
    first, second = (said["draws"][source] for said in copies.stale)
    assert first == second


def test_environment_and_what_is_derived_from_it(copies: Copies) -> None:
    for said, given in zip(copies.renewed, (FIRST, SECOND), strict=True):
        facts = said["facts"]
        assert facts["environment"] == given
        assert facts["temporary_directory"] == given["TMPDIR"]
    assert [said["facts"]["time_zone"] for said in copies.renewed] == ["UTC", "UTC"]
    hours = [said["facts"]["zone_offset_s"] for said in copies.renewed]
    assert hours == [-3600, -7200]
    stale, original = copies.stale[0]["facts"], copies.original["facts"]
    assert stale["zone_offset_s"] == original["zone_offset_s"]


def test_name_of_the_host_is_asked_anew(copies: Copies) -> None:
    for said in copies.renewed:
        assert said["facts"]["host"] == said["facts"]["host_now"] == os.uname().nodename
    assert copies.stale[0]["facts"]["host"] == STALE_HOST


@pytest.mark.skipif("amx_tile" not in CPUINFO.read_text(), reason="the processor has no AMX")
def test_matrix_unit_is_asked_for_again(copies: Copies) -> None:
    granted = [c["facts"]["matrix_unit"] for c in (copies.original, *copies.renewed, *copies.stale)]
    assert granted == [True, True, True, False, False]


def test_log_is_that_of_the_copy(copies: Copies) -> None:
    first, second, stale, _ = copies.logs
    assert first.startswith("attached as rehearsal-")
    assert second.startswith("attached as rehearsal-")
    assert first != second
    assert stale == ""


def test_pids_are_what_the_process_has(copies: Copies) -> None:
    for said in (copies.original, *copies.renewed):
        assert said["facts"]["pids"] == [1000, 1000, 1000]


def test_monotonic_time_goes_on_and_does_not_jump(copies: Copies) -> None:
    before = copies.original["facts"]["monotonic_s"]
    for said in copies.renewed:
        assert 0 < said["facts"]["monotonic_s"] - before < 100


def test_hashes_are_shared_as_documented(copies: Copies) -> None:
    assert len({said["facts"]["hash"] for said in (copies.original, *copies.renewed)}) == 1
