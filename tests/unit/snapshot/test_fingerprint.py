"""Fingerprints: any field that differs is named, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.snapshot.fingerprint import (
    Fingerprint,
    cpu_identity,
    digest_environment,
    mismatches,
    read_fingerprint,
)
from dynamo_elastic.testing.snapshots import FINGERPRINT

NAMES = [field.name for field in fields(Fingerprint)]
CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Some CPU
stepping\t: 8
cpu MHz\t\t: {mhz}
flags\t\t: {flags}

processor\t: 1
flags\t\t: other
"""


def _other(value: object) -> object:
    return value + 1 if isinstance(value, int) else f"{value}-other"


@given(st.sets(st.sampled_from(NAMES)))
def test_exactly_the_differing_fields_are_named(names: set[str]) -> None:
    changes = {name: _other(getattr(FINGERPRINT, name)) for name in names}
    found = mismatches(FINGERPRINT, replace(FINGERPRINT, **changes))  # type: ignore[arg-type]
    assert {line.partition(":")[0] for line in found} == names


def test_long_values_are_cut_in_messages() -> None:
    (line,) = mismatches(FINGERPRINT, replace(FINGERPRINT, model="x" * 1000))
    assert len(line) < 200


@pytest.mark.parametrize(
    ("mhz", "flags", "same"),
    [("2000", "sse avx", True), ("999", "avx sse", True), ("2000", "sse avx avx512f", False)],
)
def test_cpu_identity_is_of_features_not_of_clocks(mhz: str, flags: str, same: bool) -> None:
    reference = cpu_identity(CPUINFO.format(mhz="2000", flags="sse avx"))
    assert (cpu_identity(CPUINFO.format(mhz=mhz, flags=flags)) == reference) is same


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_environment_digest_ignores_order(environment: dict[str, str]) -> None:
    backwards = dict(reversed(list(environment.items())))
    assert digest_environment(environment) == digest_environment(backwards)
    assert digest_environment(environment) != digest_environment({**environment, "NEW": "1"})


def test_reading_twice_gives_the_same() -> None:
    def read(criu: str = "4.2.1") -> Fingerprint:
        return read_fingerprint(
            criu=criu,
            argv=("python",),
            environment={"OMP_NUM_THREADS": "1"},
            model="m",
            slot=3,
            control_dir=Path("/run/x"),
        )

    assert mismatches(read(), read()) == ()
    assert len(mismatches(read(), read("4.3"))) == 1
    assert all(getattr(read(), name) != "" for name in NAMES)
