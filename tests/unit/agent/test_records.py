"""What the agent leaves on disk for its successor."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_elastic.agent.base import Lease, Tier
from dynamo_elastic.agent.boot import engine_environment, shapes_engine
from dynamo_elastic.agent.records import (
    ENGINE_FILE,
    EngineRecord,
    clear,
    read_record,
    write_attach,
    write_record,
)
from dynamo_elastic.engine.base import ATTACH_FILE, Attach
from dynamo_elastic.snapshot.process import ProcessRef
from dynamo_elastic.testing.snapshots import FINGERPRINT
from dynamo_elastic.types import Epoch, Incarnation, OperationId, WorkerId

RECORD = EngineRecord(
    slot=1,
    lease=Lease(OperationId("op"), WorkerId("slot1"), Epoch(3)),
    incarnation=Incarnation("slot1-abcd"),
    tier=Tier.IMAGE,
    process=ProcessRef(123, 456),
    fingerprint=FINGERPRINT,
    fell_through=("parked: none",),
)


def test_record_comes_back(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD
    write_record(tmp_path, RECORD.ready(1.5))
    again = read_record(tmp_path)
    assert again is not None
    assert again.attached
    assert again.started(tmp_path).ready_s == 1.5
    assert again.started(tmp_path).fell_through == RECORD.fell_through
    assert (tmp_path / ENGINE_FILE).stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [ENGINE_FILE]


@pytest.mark.parametrize("text", ["", "{}", '{"slot": 1}', "[]"])
def test_record_of_another_make_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ENGINE_FILE).write_text(text)
    assert read_record(tmp_path) is None
    assert read_record(tmp_path / "absent") is None


def test_clear_leaves_no_trace_of_an_engine(tmp_path: Path) -> None:
    control_dir = tmp_path / "slot"
    clear(control_dir)
    write_record(control_dir, RECORD)
    write_attach(control_dir, Attach(RECORD.incarnation, RECORD.lease.worker_id, 1, "log"))
    assert (control_dir / ATTACH_FILE).exists()
    clear(control_dir)
    assert list(control_dir.iterdir()) == []
    assert control_dir.stat().st_mode & 0o777 == 0o700


def test_engines_inherit_by_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "UCX_TLS", "OMP_NUM_THREADS", "DYNAMO_ELASTIC_FAILPOINT"):
        monkeypatch.setenv(name, "x")
    environment = engine_environment()
    assert {"UCX_TLS", "OMP_NUM_THREADS", "PATH"} <= set(environment)
    assert shapes_engine("DYNAMO_ELASTIC_VLLM_COMMIT_TIMEOUT_S"), "or no deployment can set it"
    assert not {"AWS_SECRET_ACCESS_KEY", "DYNAMO_ELASTIC_FAILPOINT"} & set(environment)
    assert shapes_engine("UCX_TLS")
    assert not shapes_engine("PATH")
