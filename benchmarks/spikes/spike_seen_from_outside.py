"""Question 11: what /proc shows of a process that holds managed memory, NCCL or a NIXL agent.

One process takes each in turn and gives it back; after every step its maps, descriptors and thread
names are counted as another process would read them. Needs one GPU.
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import Report, run_spike
from cuda.bindings import driver
from graph_patch import check
from torch import distributed

MANAGED_BYTES = 8 << 20
_SHOWN = re.compile(r"^(/dev/|anon_inode|/memfd)")


def seen() -> dict[str, dict[str, int]]:
    """Mapped bytes by file, descriptors by kind, threads by name; library files left out."""
    mapped: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) > 5 and _SHOWN.match(fields[5]):
            begin, end = (int(word, 16) for word in fields[0].split("-"))
            mapped[re.sub(r"_[0-9a-f]{6,}", "_*", fields[5])] += end - begin
    held = Counter(
        re.sub(r"\d+", "N", os.readlink(link))
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    )
    threads = Counter(
        (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
    )
    return {"mapped_bytes": dict(mapped), "descriptors": dict(held), "threads": dict(threads)}


def pids_of_nvml() -> set[int]:
    """Pids of compute processes as NVML names them."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return {p.pid for h in handles for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)}


def managed(report: Report) -> None:
    """Managed memory, then none."""
    address = check(driver.cuMemAllocManaged(MANAGED_BYTES, 1))
    report.note("managed_alive", seen())
    check(driver.cuMemFree(address))
    report.note("managed_freed", seen())


def nccl(report: Report) -> None:
    """A communicator of one rank, then none."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
    store = f"file://{tempfile.mkdtemp()}/store"
    distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    distributed.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    report.note("nccl_alive", seen())
    distributed.destroy_process_group()
    report.note("nccl_destroyed", seen())


def nixl(report: Report) -> None:
    """A NIXL agent over UCX, then none."""
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    agent: Any = nixl_agent("seen", nixl_agent_config(backends=["UCX"]))
    report.note("nixl_alive", seen())
    del agent
    gc.collect()
    report.note("nixl_deleted", seen())


def body(report: Report) -> None:
    """Each in turn; then whether the signs were there and went away."""
    torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    report.note("plain", seen())
    report.metric("nvml_names_own_pid", os.getpid() in pids_of_nvml())
    for step in (managed, nccl, nixl):
        report.attempt(step.__name__, step)
    uvm = {
        when: report.detail[when]["mapped_bytes"].get("/dev/nvidia-uvm", 0)
        for when in ("plain", "managed_alive", "managed_freed")
    }
    report.metric("uvm_plain_bytes", uvm["plain"])
    report.metric("uvm_managed_extra_bytes", uvm["managed_alive"] - uvm["plain"])
    report.metric("uvm_freed_extra_bytes", uvm["managed_freed"] - uvm["plain"])
    for name, sign in (("nccl_alive", "pt_nccl_watchdg"), ("nccl_destroyed", "pt_nccl_watchdg")):
        report.metric(f"{name}_sign", report.detail[name]["threads"].get(sign, 0))
    for name in ("nixl_alive", "nixl_deleted"):
        maps = report.detail[name]["mapped_bytes"]
        report.metric(f"{name}_sign", sum("ucx_shm_posix" in path for path in maps))


if __name__ == "__main__":
    run_spike("seen_from_outside", body, lambda: None)
