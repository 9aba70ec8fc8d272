"""What was ever stored is read: records in etcd, manifests of images, what agents wrote down.

tests/golden has what each version stored, once; see make.py there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from dynamo_elastic.agent.records import EngineRecord, ParkedRecord
from dynamo_elastic.coordinator import records
from dynamo_elastic.coordinator.records import (
    AckRecord,
    CapacityRecord,
    CommandRecord,
    EndpointRecord,
    MemberRecord,
    OperationRecord,
    RecordError,
    RecordNewer,
    TargetOutcome,
    TargetRecord,
    WarningRecord,
    decode,
    encode,
    plain,
)
from dynamo_elastic.engine.base import Attach
from dynamo_elastic.errors import SnapshotDamaged, SnapshotNewer
from dynamo_elastic.snapshot import manifest as manifests
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE
from dynamo_elastic.snapshot.prune import Bounds, Judgement, prune
from dynamo_elastic.testing.snapshots import publish_image
from dynamo_elastic.topology import Topology
from dynamo_elastic.types import Epoch, WorkerId

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS: dict[str, type[Any]] = {
    "ack": AckRecord,
    "capacity": CapacityRecord,
    "command": CommandRecord,
    "endpoint": EndpointRecord,
    "epoch": int,
    "member": MemberRecord,
    "notice": str,
    "operation": OperationRecord,
    "outcome": TargetOutcome,
    "target": TargetRecord,
    "topology": Topology,
    "warning": WarningRecord,
}
STORED = sorted(GOLDEN.glob("records-v*/*.json"))


def values(stored: Path) -> Any:
    return json.loads(stored.read_bytes())["record"]


def contains(now: Any, then: Any) -> bool:
    """Everything that was said is still said; fields may have come since."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(contains(now.get(k), v) for k, v in then.items())
    if isinstance(then, list):
        return len(now) == len(then) and all(map(contains, now, then))
    return bool(now == then)


def test_every_kind_is_there_in_every_version() -> None:
    versions = {path.parent.name for path in STORED}
    assert f"records-v{records.SCHEMA_VERSION}" in versions
    for version in versions:
        assert {p.stem for p in STORED if p.parent.name == version} >= set(KINDS)


@pytest.mark.parametrize("stored", STORED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_records_of_every_version_are_read(stored: Path) -> None:
    record = decode(KINDS[stored.stem], stored.read_bytes())
    if stored.parent.name == f"records-v{records.SCHEMA_VERSION}":
        assert contains(plain(encode(record)) or values(Path(stored)), values(stored))
    assert decode(KINDS[stored.stem], encode(record)) == record


@pytest.mark.parametrize("stored", STORED, ids=lambda p: p.stem)
def test_a_newer_version_is_refused_by_both_numbers_and_a_remedy(stored: Path) -> None:
    version = records.NEWEST_READ + 1
    newer = stored.read_bytes().replace(b'"schema_version":1', b'"schema_version":%d' % version)
    with pytest.raises(RecordNewer) as caught:
        decode(KINDS[stored.stem], newer)
    said = f"schema version {version}, this program reads 1-{records.NEWEST_READ}: upgrade it"
    assert said in str(caught.value)


@pytest.mark.parametrize("version", [b"0", b"-1", b'"1"', b"1.0", b"true", b"null", b"[]"])
def test_what_is_no_version_is_damage(version: bytes) -> None:
    with pytest.raises(RecordError) as caught:
        decode(int, b'{"schema_version":%s,"record":7}' % version)
    assert not isinstance(caught.value, RecordNewer)


def test_a_newer_program_reads_what_an_older_one_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a release will that splits a field: each version is lifted to the next."""

    def lift(kind: str, body: Any) -> Any:
        return {**body, "host": f"{body['host']}.example"} if kind == "MemberRecord" else body

    def lift_again(kind: str, body: Any) -> Any:
        return {**body, "host": body["host"].upper()} if kind == "MemberRecord" else body

    monkeypatch.setattr(records, "NEWEST_READ", 3)
    monkeypatch.setattr(records, "UPGRADES", {1: lift, 2: lift_again})
    raw = (GOLDEN / "records-v1" / "member.json").read_bytes()
    assert decode(MemberRecord, raw).host == "HOST-A.EXAMPLE"
    assert decode(int, (GOLDEN / "records-v1" / "epoch.json").read_bytes()) == 7
    monkeypatch.setattr(records, "SCHEMA_VERSION", 3)
    assert decode(int, encode(8)) == 8


@pytest.mark.parametrize("stored", STORED, ids=lambda p: p.stem)
def test_fields_that_came_later_are_ignored(stored: Path) -> None:
    """So most releases bring no new version: an older reader takes what it knows."""
    envelope = json.loads(stored.read_bytes())
    if isinstance(envelope["record"], dict):
        envelope["record"]["came_later"] = {"x": 1}
    kind = KINDS[stored.stem]
    assert decode(kind, json.dumps(envelope).encode()) == decode(kind, stored.read_bytes())


def test_a_large_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = decode(Topology, (GOLDEN / "records-v1" / "topology.json").read_bytes())
    member = topology.members[0]
    wide = replace(
        topology,
        epoch=Epoch(9),
        members=tuple(replace(member, worker_id=WorkerId(f"slot{n}")) for n in range(1000)),
    )
    assert decode(Topology, encode(wide)) == wide


@pytest.mark.parametrize(("name", "kind"), [("engine", EngineRecord), ("parked", ParkedRecord)])
def test_an_agent_reads_what_its_predecessors_wrote_down(name: str, kind: type[Any]) -> None:
    """Or it would take engines that serve for strangers, and end them."""
    raw = (GOLDEN / "agent-v1" / f"{name}.json").read_bytes()
    record = TypeAdapter(kind).validate_json(raw)
    assert contains(TypeAdapter(kind).dump_python(record, mode="json"), json.loads(raw))
    later = {**json.loads(raw), "came_later": 1}
    assert TypeAdapter(kind).validate_json(json.dumps(later)) == record


def test_an_older_engine_takes_a_newer_identity() -> None:
    attach = Attach(incarnation="i", worker_id="w", seed=1, log_path="/x", environment={})  # type: ignore[arg-type]
    body = TypeAdapter(Attach).dump_python(attach, mode="json") | {"came_later": 1}
    assert TypeAdapter(Attach).validate_python(body) == attach


def test_manifests_of_every_version_are_read_and_altered_ones_are_not() -> None:
    found = sorted(GOLDEN.glob("manifest-v*.json"))
    assert f"manifest-v{manifests.SCHEMA_VERSION}.json" in {p.name for p in found}
    assert f"manifest-v{manifests.OLDEST_VERSION}.json" in {p.name for p in found}
    for path in found:
        data = path.read_bytes()
        manifest = manifests.decode(data, "it")
        assert manifest.image_id == "slot1-20261130t170000-3f9a"
        assert f"manifest-v{manifest.schema_version}.json" == path.name
        with pytest.raises(SnapshotDamaged, match="altered"):
            manifests.decode(data.replace(b'"slot": 1', b'"slot": 2', 1), "it")


def test_an_older_image_is_listed_and_not_run(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "images")
    data = (GOLDEN / "manifest-v4.json").read_bytes()
    manifest = manifests.decode(data, "it")
    with catalog.draft(manifest.image_id) as draft:
        catalog.publish(draft, manifest)
    assert catalog.manifests() == (manifest,)
    with pytest.raises(SnapshotDamaged, match="schema 4, images of 5 run: create the image anew"):
        catalog.verify(manifest)


def test_a_newer_image_is_refused_and_left_alone(tmp_path: Path) -> None:
    """After a step back, or on a host of two versions: it is not for an older one to remove."""
    catalog = Catalog(tmp_path / "images")
    publish_image(catalog)
    path = catalog.root / "slot0-a" / MANIFEST_FILE
    path.write_bytes(path.read_bytes().replace(b'"schema_version": 5', b'"schema_version": 6'))
    with pytest.raises(SnapshotNewer, match="schema 6, this version reads 4 to 5: upgrade"):
        catalog.inspect("slot0-a")
    assert catalog.manifests() == ()
    report = prune(catalog, Bounds(1, 1, 1.0), lambda _: Judgement(ours=True, stale="x"))
    assert report.removed == ()
    assert path.exists()
