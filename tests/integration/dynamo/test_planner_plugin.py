"""Our plugin with Dynamo's own types and a real etcd: what it does, and that it never raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.coordinator.etcd import EtcdStore
from dynamo_elastic.coordinator.records import CapacityRecord, Keys, encode
from dynamo_elastic.coordinator.store import Put
from dynamo_elastic.testing.deployments import asyncio_test
from dynamo_elastic.testing.etcd_process import EtcdProcess, etcd_process

pytestmark = [pytest.mark.etcd, pytest.mark.dynamo]

KEYS = Keys("test")


def plugin(etcd: EtcdProcess) -> Any:
    from dynamo_elastic.dynamo.planner_plugin import LegalWidths

    return LegalWidths(
        endpoints=[etcd.url], deployment="test", namespace="dynamo", full_kv_share=0.5
    )


def request(ready: int | None, wanted: int | None) -> Any:
    from dynamo.planner.plugins.types import (
        ComponentTarget,
        ObservationData,
        PipelineContext,
        ReconcileStageRequest,
        ScalingProposal,
        WorkerState,
    )

    targets = [ComponentTarget(sub_component_type="decode", replicas=wanted)]
    context = PipelineContext(
        observations=ObservationData(workers=WorkerState(ready_decode=ready)),
        proposal=ScalingProposal(targets=targets),
    )
    return ReconcileStageRequest(context=context)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plugin logs; importing the planner takes logging away from pytest."""
    from dynamo_elastic.dynamo import planner_plugin

    texts: list[str] = []
    monkeypatch.setattr(
        planner_plugin.log, "warning", lambda form, *values: texts.append(form % values)
    )
    return texts


async def store_value(etcd: EtcdProcess, value: bytes) -> None:
    store = EtcdStore([etcd.url])
    await store.txn([], [Put(KEYS.capacity, value)])
    await store.close()


@asyncio_test
async def test_decisions_become_legal_and_the_rest_passes(tmp_path: Path, said: list[str]) -> None:
    from dynamo.planner.plugins.types import OverrideType, ReconcileStageRequest

    with etcd_process(tmp_path / "etcd") as etcd:
        it = plugin(etcd)
        # Nothing is published yet: the decision passes, and why is said once, not every time.
        for _ in range(3):
            assert (await it.Reconcile(request(2, 3))).result_kind == "accept"
        assert len(said) == 1
        assert "nothing under /dynamo-elastic/test/capacity" in said[0]
        await store_value(etcd, encode(CapacityRecord(2, (2, 4), 4)))
        answer = await it.Reconcile(request(2, 3))
        (target,) = answer.override.targets
        assert (target.sub_component_type, target.replicas) == ("decode", 4)
        assert target.type is OverrideType.SET
        assert answer.override.reason == "3 -> 4: legal widths are 2, 4"
        # Nobody reports a load, so nobody knows that two ranks would do.
        answer = await it.Reconcile(request(4, 3))
        assert answer.override.targets[0].replicas == 4
        for plain in (request(2, 4), request(2, 2), request(None, 3), ReconcileStageRequest()):
            assert (await it.Reconcile(plain)).result_kind == "accept"


@asyncio_test
async def test_it_never_raises(tmp_path: Path, said: list[str]) -> None:
    with etcd_process(tmp_path / "etcd") as etcd:
        it = plugin(etcd)
        await store_value(etcd, b"not a record")
        assert (await it.Reconcile(request(2, 3))).result_kind == "accept"
        assert "decision not looked at: RecordError" in said[-1]
        etcd.pause()
        assert (await it.Reconcile(request(2, 3))).result_kind == "accept"
        etcd.resume()
        etcd.kill()
        assert (await it.Reconcile(request(2, 3))).result_kind == "accept"
        assert "TimeoutError" in said[-1] or "StoreUnavailable" in said[-1]
        assert (await it.Reconcile(None)).result_kind == "accept"
        # etcd is back: so is the plugin.
        etcd.start()
        await store_value(etcd, encode(CapacityRecord(2, (2, 4), 4)))
        assert (await it.Reconcile(request(2, 3))).override.targets[0].replicas == 4
