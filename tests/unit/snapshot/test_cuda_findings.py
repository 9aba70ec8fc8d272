"""What a process must not hold when it leaves its GPU, each named with its remedy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dynamo_elastic.errors import NotQuiescent
from dynamo_elastic.snapshot.cuda_findings import (
    IPC_CACHE,
    MANAGED_LIMIT_BYTES,
    check_parkable,
    ipc_cache_findings,
    is_driver_device,
    library_findings,
    managed_findings,
    open_files,
    report_findings,
    thread_names,
    trace_findings,
)
from dynamo_elastic.snapshot.process import identify
from dynamo_elastic.testing.snapshot_world import CLEAN

# As /proc/PID/maps shows a process with a context, and one more mapping of a given size.
MAPS = """\
200000000-200200000 rw-s 00000000 00:06 504 /dev/nvidiactl
200200000-200400000 rw-s 00000000 00:06 507 /dev/nvidia-uvm
7f2000000000-7f2000400000 ---p 00000000 00:00 0
7f2a00000000-7f2a00010000 -w-s 00000000 00:06 511 /dev/nvidia0
7f2b00000000-{end:x} rw-s 7f2b00000000 00:06 507 /dev/nvidia-uvm
"""


@pytest.mark.parametrize("value", ["n", "N", "no", "off", "0"])
def test_ipc_cache_that_is_off(value: str) -> None:
    assert list(ipc_cache_findings(f"A=1\0{IPC_CACHE}={value}\0".encode())) == []


@pytest.mark.parametrize(
    "environ", ["", "A=1\0", "UCX_CUDA_IPC_CACHE=y\0", "UCX_CUDA_IPC_CACHE=\0"]
)
def test_ipc_cache_that_is_on(environ: str) -> None:
    (finding,) = ipc_cache_findings(environ.encode())
    assert "start the engine with UCX_CUDA_IPC_CACHE=n" in finding


def test_libraries_are_known_by_their_threads() -> None:
    quiet = ["python3", "cuda-EvtHandlr", "cuda00001400006", "asyncio_0"]
    assert list(library_findings(quiet)) == []
    (nccl,) = library_findings([*quiet, "NCCL Service 0", "pt_nccl_watchdg"])
    assert nccl.startswith("NCCL is alive (2 of its threads)")
    (ucx,) = library_findings([*quiet, "async"])
    assert ucx.startswith("UCX (a NIXL agent or Buffer) is alive")


def test_files_that_tell() -> None:
    plain = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/shm/other", "/usr/lib/x.so"]
    assert list(trace_findings(plain)) == []
    found = list(
        trace_findings(
            [
                *plain,
                "/dev/shm/nccl-Ab12 (deleted)",
                "/dev/shm/ucx_shm_posix_1 (deleted)",
                "/dev/nvidia-caps-imex-channels/channel0",
                "/dev/infiniband/uverbs0",
                "/dev/gdrdrv",
            ]
        )
    )
    assert len(found) == 5
    for word in ("NCCL", "UCX", "fabric", "RDMA", "GDRCopy"):
        assert any(word in finding for finding in found)


def test_managed_memory_is_what_is_mapped_beyond_the_usual() -> None:
    start = 0x7F2B00000000
    assert list(managed_findings(MAPS.format(end=start + (2 << 20)))) == []
    (finding,) = managed_findings(MAPS.format(end=start + MANAGED_LIMIT_BYTES))
    assert f"{MANAGED_LIMIT_BYTES + (2 << 20)} bytes" in finding
    assert "managed memory" in finding


@pytest.mark.parametrize(
    ("device", "is_one"),
    [
        ("/dev/nvidia0", True),
        ("/dev/nvidia12", True),
        ("/dev/nvidiactl", True),
        ("/dev/nvidia-uvm", True),
        ("/dev/nvidia-uvm-tools", True),
        ("/dev/nvme0", False),
        ("/srv/dev/nvidia0", False),
    ],
)
def test_devices_of_the_driver(device: str, is_one: bool) -> None:
    assert is_driver_device(device) is is_one


def test_report_of_the_engine() -> None:
    nothing = {"multicast": 0, "ipc_imports": 0, "managed_bytes": 0}
    assert list(report_findings({"cuda": nothing})) == []
    (finding,) = report_findings({})
    assert "write 'cuda' into its ready file" in finding
    assert len(list(report_findings({"cuda": {}}))) == 3
    (finding,) = report_findings({"cuda": {**nothing, "multicast": 2}})
    assert finding.startswith("2 multicast objects")
    (finding,) = report_findings({"cuda": {**nothing, "ipc_imports": 1}})
    assert "imported" in finding


def test_a_real_process_is_looked_at() -> None:
    with subprocess.Popen(["/bin/sleep", "600"], env={IPC_CACHE: "n"}) as good:
        with subprocess.Popen(["/bin/sleep", "600"], env={}) as bad:
            first, second = identify(good.pid), identify(bad.pid)
            assert first is not None
            assert second is not None
            check_parkable([first], CLEAN)
            with pytest.raises(NotQuiescent) as caught:
                check_parkable([first, second], CLEAN)
            assert len(caught.value.findings) == 1
            with pytest.raises(NotQuiescent, match="does not say"):
                check_parkable([first], {})
            check_parkable([], {})
            bad.kill()
        good.kill()


def test_what_goes_while_it_is_looked_at_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that was closed, and a thread that ended, between the list and the look."""
    descriptors, tasks = tmp_path / "fd", tmp_path / "task"
    for thread in ("11", "12"):
        (tasks / thread).mkdir(parents=True)
    (tasks / "11" / "comm").write_text("python3\n")
    descriptors.mkdir()
    for number in ("3", "4"):
        (descriptors / number).symlink_to("/dev/null")
    readlink = os.readlink

    def closed(path: Path) -> str:
        if path.name == "4":
            raise FileNotFoundError(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", closed)
    assert list(open_files(descriptors)) == ["/dev/null"]
    assert list(thread_names(tasks)) == ["python3"]
