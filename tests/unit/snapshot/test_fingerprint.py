"""Fingerprints: any field that differs is named, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.snapshot.base import GpuInfo
from dynamo_elastic.snapshot.fingerprint import (
    Fingerprint,
    cpu_identity,
    digest_environment,
    machine_mismatches,
    mismatches,
    read_fingerprint,
    visible_gpus,
)
from dynamo_elastic.testing.cuda import fake_gpus
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


FOUR = fake_gpus(4)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        (FOUR[2].uuid, [2]),
        ("GPU-00000001", [1]),
        ("GPU-0000", []),
        ("1,9,2", [1]),
        ("-1", []),
    ],
)
def test_gpus_that_an_engine_sees(visible: str | None, expected: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.index for gpu in visible_gpus(FOUR, environment)] == expected


def gpu_fingerprint(gpus: Sequence[GpuInfo], **environment: str) -> Fingerprint:
    return read_fingerprint(
        criu="4.2.1",
        argv=("python",),
        environment=environment,
        model="m",
        slot=1,
        control_dir=Path("/run/x"),
        gpus=gpus,
    )


def test_without_a_gpu_its_fields_say_none() -> None:
    found = gpu_fingerprint(())
    names = ("gpu_driver", "gpu_model", "gpu", "host_gpus", "ucx_cuda_ipc_cache")
    assert {getattr(found, name) for name in names} == {"none"}


def test_gpu_fields() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "1", "UCX_CUDA_IPC_CACHE": "n"}
    found = gpu_fingerprint(FOUR, **environment)
    assert found.gpu == FOUR[1].uuid
    assert found.gpu_model == "NVIDIA Fake 9.0"
    assert found.gpu_driver == "580.159.04"
    assert found.host_gpus.count("GPU-") == 4
    assert (found.cuda_visible_devices, found.ucx_cuda_ipc_cache) == ("1", "n")

    def differing(gpus: Sequence[GpuInfo], **changes: str) -> set[str]:
        here = gpu_fingerprint(gpus, **{**environment, **changes})
        return {line.partition(":")[0] for line in mismatches(found, here)}

    assert differing(FOUR) == set()
    assert differing([replace(g, driver_version="590.1") for g in FOUR]) == {"gpu_driver"}
    assert differing([replace(g, free_bytes=0) for g in FOUR]) == set()
    assert differing(tuple(reversed(FOUR))) == {"host_gpus"}
    assert differing(FOUR[:3]) == {"host_gpus"}
    assert differing([replace(g, compute_capability="10.0") for g in FOUR]) == {"gpu_model"}
    assert differing(FOUR, UCX_CUDA_IPC_CACHE="y") == {"ucx_cuda_ipc_cache", "environment"}


def test_difference_behind_a_long_common_beginning_is_shown() -> None:
    (line,) = mismatches(gpu_fingerprint(FOUR), gpu_fingerprint([*FOUR[:3], *fake_gpus(5)[4:]]))[:1]
    assert "GPU-00000003" in line
    assert "GPU-00000004" in line


def test_driver_of_another_deployments_image_is_compared_only_where_it_is_known() -> None:
    image = replace(gpu_fingerprint(FOUR), criu="4.2.1")
    assert machine_mismatches(image, criu="4.2.1") == ()
    assert machine_mismatches(image, criu="4.2.1", gpus=FOUR) == ()
    (line,) = machine_mismatches(
        image, criu="4.2.1", gpus=[replace(g, driver_version="590.1") for g in FOUR]
    )
    assert line.startswith("gpu_driver")


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
