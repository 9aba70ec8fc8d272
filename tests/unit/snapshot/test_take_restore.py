"""Taking and restoring over a fake imager: what is told, what is left after each failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynamo_elastic.errors import (
    ImagerError,
    NotQuiescent,
    SnapshotDamaged,
    SnapshotError,
    SnapshotInUse,
    SnapshotMismatch,
)
from dynamo_elastic.snapshot.base import (
    RestorePhase,
    TakePhase,
)
from dynamo_elastic.snapshot.process import ProcessRef, alive
from dynamo_elastic.testing.imager import FakeImager
from dynamo_elastic.testing.snapshot_world import WAIT, SnapshotWorld, come_up


@pytest.fixture
def imager() -> FakeImager:
    return FakeImager()


@pytest.fixture
def world(tmp_path: Path, imager: FakeImager) -> Iterator[SnapshotWorld]:
    world = SnapshotWorld(tmp_path, imager)
    yield world
    world.close()


def test_take_tells_its_phases_and_lists_the_image_last(world: SnapshotWorld) -> None:
    manifest = world.take(come_up())
    assert world.phases == list(TakePhase)[1:-1]
    assert world.catalog.inspect(manifest.image_id) == manifest
    assert manifest.timings_s.keys() >= {"boot", "inspect", "dump", "store"}
    assert manifest.fingerprint == world.here


@pytest.mark.parametrize(
    ("code", "reason", "error"),
    [
        ("raise SystemExit('broken model')", "broken model", SnapshotError),
        (WAIT, "not ready after", SnapshotError),
        (f"import socket; s = socket.socket(); {come_up()}", "a socket", NotQuiescent),
        (f"import os; p = os.pipe(); os.close(p[0]); {come_up()}", "a pipe", NotQuiescent),
        (f"f = open('/etc/passwd'); {come_up()}", "outside the control", NotQuiescent),
        (f"import os; os.fork() or exec('{WAIT}'); {come_up()}", "child process", NotQuiescent),
    ],
)
def test_failed_take_leaves_nothing(
    world: SnapshotWorld, code: str, reason: str, error: type[SnapshotError]
) -> None:
    with pytest.raises(error, match=reason):
        world.take(code, timeout_s=10.0 if error is NotQuiescent or "broken" in reason else 0.3)
    assert world.phases[-1] is TakePhase.FAILED
    assert world.catalog.entries() == {}
    assert world.catalog.partials() == ()
    lines = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    assert not any(str(world.control_dir) in line for line in lines)


def test_failed_dump_leaves_nothing(world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: list[ProcessRef] = []

    def fail(process: ProcessRef, directory: Path, *_: object, **__: object) -> None:
        spawned.append(process)
        (directory / "pages-1.img").write_bytes(b"half")
        raise ImagerError(["criu", "dump"], 1, "no")

    monkeypatch.setattr(world.imager, "dump", fail)
    with pytest.raises(ImagerError):
        world.take(come_up())
    assert world.catalog.entries() == {}
    assert world.catalog.partials() == ()
    assert not alive(spawned[0])


def test_restore_compares_verifies_and_runs(world: SnapshotWorld) -> None:
    manifest = world.take(come_up())
    world.phases.clear()
    restored = world.restore(manifest)
    assert world.phases == list(RestorePhase)[1:-1]
    assert alive(restored.process)
    assert restored.timings_s.keys() >= {"compare", "verify", "restore"}


def test_mismatch_and_damage_run_nothing(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = world.take(come_up())

    def never(*_: object, **__: object) -> ProcessRef:
        raise AssertionError("the imager was asked")

    monkeypatch.setattr(world.imager, "restore", never)
    world.here = replace(world.here, model="another", kernel="9.9")
    with pytest.raises(SnapshotMismatch) as caught:
        world.restore(manifest)
    assert len(caught.value.mismatches) == 2
    assert world.phases[-2:] == [RestorePhase.COMPARE, RestorePhase.FAILED]

    world.here = manifest.fingerprint
    (world.catalog.directory(manifest.image_id) / "pages-1.img").write_bytes(b"x")
    with pytest.raises(SnapshotDamaged):
        world.restore(manifest)
    assert world.phases[-2:] == [RestorePhase.VERIFY, RestorePhase.FAILED]


def test_image_is_held_while_it_is_restored_and_then_was_used(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = world.take(come_up())
    os.utime(world.catalog.root / manifest.image_id, (1, 1))
    restore = world.imager.restore

    def meanwhile(*args: Any, **kwargs: Any) -> ProcessRef:
        with pytest.raises(SnapshotInUse):
            world.catalog.remove(manifest.image_id)
        return restore(*args, **kwargs)

    monkeypatch.setattr(world.imager, "restore", meanwhile)
    world.restore(manifest)
    assert world.catalog.last_used(manifest.image_id) > 1
    world.catalog.remove(manifest.image_id)
