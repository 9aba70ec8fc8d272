"""Which images go, why, and that those in use stay."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.manifest import MANIFEST_FILE, ImageFile, Manifest
from dynamo_elastic.snapshot.prune import Bounds, Candidate, Judgement, evictions, prune
from dynamo_elastic.testing.snapshots import FINGERPRINT, publish_image

WIDE = Bounds(100, 1 << 40, 1e9)
FITS = Judgement(ours=True, stale="")
NOW = 1000.0


def candidate(
    image_id: str, *, at: str = "1", slot: int = 0, size: int = 10, used: float = NOW, **judged: str
) -> Candidate:
    manifest = Manifest(
        image_id=image_id,
        slot=slot,
        created_at=at,
        root_pid=1000,
        fingerprint=replace(FINGERPRINT, slot=slot, control_dir=f"/run/{slot}"),
        files=(ImageFile("pages-1.img", size, ""),),
    )
    return Candidate(manifest, used, replace(FITS, stale=judged.get("stale", "")))


def reasons(candidates: list[Candidate], bounds: Bounds) -> dict[str, str]:
    return {e.image_id: e.reason for e in evictions(candidates, bounds, NOW)}


def test_within_all_bounds_nothing_goes() -> None:
    assert reasons([candidate("a"), candidate("b", slot=1)], WIDE) == {}


def test_stale_and_unused_ones_go() -> None:
    found = reasons(
        [candidate("a", stale="kernel: x"), candidate("b", used=0), candidate("c")],
        replace(WIDE, max_age_s=999),
    )
    assert found == {"a": "stale: kernel: x", "b": "unused for more than 999 s"}


def test_oldest_of_a_slot_go_and_those_of_others_do_not_count() -> None:
    several = [candidate("a", at="1"), candidate("b", at="3"), candidate("c", at="2")]
    foreign = replace(candidate("d", at="0"), judgement=Judgement(ours=False, stale=""))
    other = candidate("e", slot=1)
    found = reasons([*several, foreign, other], replace(WIDE, max_images_per_slot=2))
    assert found == {"a": "more than 2 of its slot"}


def test_least_recently_used_go_until_the_rest_fits() -> None:
    several = [candidate(name, used=used) for name, used in (("a", 3), ("b", 1), ("c", 2))]
    found = reasons(several, replace(WIDE, max_bytes=19))
    assert list(found) == ["b", "c"]


CANDIDATES = st.lists(
    st.builds(
        candidate,
        st.uuids().map(str),
        at=st.integers(0, 5).map(str),
        slot=st.integers(0, 2),
        size=st.integers(0, 50),
        used=st.floats(0, NOW),
        stale=st.sampled_from(["", "", "kernel"]),
    ),
    max_size=12,
)


@given(CANDIDATES, st.integers(1, 3), st.integers(0, 200), st.floats(1, NOW))
def test_what_is_left_is_within_bounds(
    candidates: list[Candidate], per_slot: int, max_bytes: int, max_age_s: float
) -> None:
    found = evictions(candidates, Bounds(per_slot, max_bytes, max_age_s), NOW)
    gone = {e.image_id for e in found}
    assert len(gone) == len(found)
    left = [c for c in candidates if c.manifest.image_id not in gone]
    assert sum(c.manifest.size_bytes for c in left) <= max_bytes
    assert all(NOW - c.last_used <= max_age_s and not c.judgement.stale for c in left)
    for slot in range(3):
        assert sum(c.manifest.slot == slot for c in left) <= per_slot
    # And no more goes than has to: each that went stood against one bound.
    assert all(e.reason for e in found)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    catalog = Catalog(tmp_path / "images")
    for at in "123":
        publish_image(catalog, f"slot0-{at}", at=at)
    return catalog


def ours(_: Manifest) -> Judgement:
    return FITS


def test_image_in_use_is_kept_and_named(catalog: Catalog) -> None:
    with catalog.hold("slot0-1"):
        for dry_run in (True, False):
            report = prune(catalog, replace(WIDE, max_images_per_slot=1), ours, dry_run=dry_run)
            assert [e.image_id for e in report.removed] == ["slot0-2"]
            (kept,) = report.kept
            assert kept.image_id == "slot0-1"
            assert "in use" in kept.reason
        assert set(catalog.entries()) == {"slot0-1", "slot0-3"}
    prune(catalog, replace(WIDE, max_images_per_slot=1), ours)
    assert set(catalog.entries()) == {"slot0-3"}


def test_dry_run_changes_nothing(catalog: Catalog) -> None:
    (catalog.root / ".partial-x").mkdir(mode=0o700)
    (catalog.root / "slot0-1" / MANIFEST_FILE).write_text("{")
    before = sorted(catalog.root.iterdir())
    report = prune(catalog, replace(WIDE, max_bytes=256 * 64), ours, dry_run=True)
    assert {e.image_id for e in report.removed} >= {"slot0-1"}
    assert report.removed[0].reason.startswith("damaged: ")
    assert report.partials == (".partial-x",)
    assert sorted(catalog.root.iterdir()) == before
    again = prune(catalog, replace(WIDE, max_bytes=256 * 64), ours)
    assert again.removed == report.removed
    assert again.left_bytes == report.left_bytes == 256 * 64
    assert len(catalog.entries()) == 1
    assert catalog.partials() == ()


def test_use_is_remembered_by_the_time_of_the_directory(catalog: Catalog) -> None:
    for image_id in catalog.entries():
        os.utime(catalog.root / image_id, (1, 1))
    catalog.touch("slot0-1")
    assert time.time() - catalog.last_used("slot0-1") < 60
    prune(catalog, replace(WIDE, max_age_s=3600), ours)
    assert set(catalog.entries()) == {"slot0-1"}


def test_catalog_that_is_not_there(tmp_path: Path) -> None:
    report = prune(Catalog(tmp_path / "none"), WIDE, ours)
    assert (report.removed, report.partials) == ((), ())
    assert not (tmp_path / "none").exists()
