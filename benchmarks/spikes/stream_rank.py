"""One end of a weight transfer: fills, registers, copies with a deadline, compares every byte."""

from __future__ import annotations

import base64
import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import rank_process
import torch
import vmm
from cuda.bindings import driver
from graph_patch import check
from nixl_cu13._api import nixl_agent, nixl_agent_config

IPC_HANDLE_BYTES = 64
PIECE = 1 << 28  # elements worked on at once when filling and comparing


class StreamRank:
    """Operations the driver may ask for."""

    def __init__(self) -> None:
        self.agent: Any = None
        self.arena: vmm.Arena | None = None
        self.imported: vmm.Imported | None = None
        self.memory: torch.Tensor | None = None
        self.bounce: torch.Tensor | None = None
        self.registered: Any = None
        self.peer = ""
        self.address = self.size_bytes = self.chunk_bytes = self.ipc_address = 0

    # -- memory --------------------------------------------------------------------------------
    def reserve(self, size_bytes: int) -> str:
        """Reserve the arena's addresses before the snapshot, as an engine does."""
        torch.cuda.synchronize()
        self.address = vmm.reserve(size_bytes)
        return hex(self.address)

    def allocate(self, kind: str, size_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """`malloc`, or an arena whose chunks have the given handle type."""
        begin = time.perf_counter()
        self.size_bytes, self.chunk_bytes = size_bytes, chunk_bytes
        if kind == "malloc":
            self.memory = torch.empty(size_bytes // 4, dtype=torch.int32, device="cuda")
        else:
            self.arena = vmm.Arena(
                self.address or vmm.reserve(size_bytes), size_bytes, chunk_bytes, kind
            )
            self.arena.map()
            self.memory = vmm.as_tensor(self.arena.address, size_bytes)
        torch.cuda.synchronize()
        return {"allocate_s": time.perf_counter() - begin, "address": self.memory.data_ptr()}

    def release(self) -> None:
        """Give the memory back."""
        self.memory = self.bounce = None
        if self.arena is not None:
            torch.cuda.synchronize()
            self.arena.unmap()
            self.arena = None
        torch.cuda.empty_cache()

    def _pattern(self, first: int, count: int, seed: int) -> torch.Tensor:
        numbers = torch.arange(first, first + count, device="cuda", dtype=torch.int64)
        return ((numbers * 2654435761 + seed * 40503) >> 7).to(torch.int32)

    def fill(self, seed: int) -> None:
        """Write a pattern in which no two chunks agree."""
        memory = self._memory()
        for first in range(0, memory.numel(), PIECE):
            part = memory[first : first + PIECE]
            part.copy_(self._pattern(first, part.numel(), seed))
        torch.cuda.synchronize()

    def poison(self) -> None:
        """Make bytes that are never written show."""
        self._memory().fill_(-1)
        torch.cuda.synchronize()

    def compare(self, seed: int) -> int:
        """Bytes that differ from the pattern."""
        memory, wrong = self._memory(), 0
        for first in range(0, memory.numel(), PIECE):
            part = memory[first : first + PIECE]
            wrong += int((part != self._pattern(first, part.numel(), seed)).sum())
        return wrong * 4

    def _memory(self) -> torch.Tensor:
        if self.memory is None:
            raise RuntimeError("nothing is allocated")
        return self.memory

    # -- NIXL ----------------------------------------------------------------------------------
    def open_agent(self, name: str) -> float:
        """Create the agent; after a restore, never before."""
        begin = time.perf_counter()
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        return time.perf_counter() - begin

    def _spans(self, address: int, step_bytes: int) -> list[tuple[int, int, int]]:
        return [
            (address + at, min(step_bytes, self.size_bytes - at), 0)
            for at in range(0, self.size_bytes, step_bytes)
        ]

    def register(self, per_chunk: bool) -> dict[str, Any]:
        """Register the memory as one region or chunk by chunk."""
        begin = time.perf_counter()
        step = self.chunk_bytes if per_chunk else self.size_bytes
        regions = [(*span, "") for span in self._spans(self._memory().data_ptr(), step)]
        self.registered = self.agent.register_memory(regions, "VRAM")
        seconds = time.perf_counter() - begin
        return {
            "register_s": seconds,
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
        }

    def deregister(self) -> None:
        """Forget the peer and the registration."""
        if self.peer:
            self.agent.remove_remote_agent(self.peer)
            self.peer = ""
        self.agent.deregister_memory(self.registered)

    def load(self, metadata: str) -> str:
        """Learn the peer's metadata."""
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.peer = name.decode() if isinstance(name, bytes) else name
        return self.peer

    def transfer(
        self, direction: str, remote_address: int, step_bytes: int, repeats: int, deadline_s: float
    ) -> dict[str, Any]:
        """WRITE (push) or READ (pull) the whole memory; the deadline covers every repeat."""
        here = self.agent.get_xfer_descs(self._spans(self._memory().data_ptr(), step_bytes), "VRAM")
        there = self.agent.get_xfer_descs(self._spans(remote_address, step_bytes), "VRAM")
        handle = self.agent.initialize_xfer(direction, here, there, self.peer)
        rates: list[float] = []
        for _ in range(repeats):
            begin = time.perf_counter()
            state = self.agent.transfer(handle)
            while state == "PROC":
                if time.perf_counter() - begin > deadline_s:
                    return {"hung_s": time.perf_counter() - begin, "rates": rates}
                state = self.agent.check_xfer_state(handle)
            rates.append(self.size_bytes / (time.perf_counter() - begin) / 1e9)
            if state != "DONE":
                return {"state": state, "rates": rates}
        self.agent.release_xfer_handle(handle)
        return {"rates": rates, "descriptors": len(self._spans(0, step_bytes))}

    # -- without NIXL --------------------------------------------------------------------------
    def send_handles(self, path: str) -> None:
        """Offer the arena's chunks to one process."""
        if self.arena is None:
            raise RuntimeError("no arena is mapped")
        self.arena.send_handles(path)

    def import_peer(self, path: str, size_bytes: int, chunk_bytes: int) -> float:
        """Map the peer's arena here."""
        begin = time.perf_counter()
        while not os.path.exists(path):
            time.sleep(0.001)
        self.imported = vmm.Imported(path, size_bytes, chunk_bytes)
        return time.perf_counter() - begin

    def close_import(self) -> None:
        """Unmap the peer's arena."""
        if self.imported is not None:
            self.imported.close()
            self.imported = None

    def copy_mapped(self, push: bool, streams: int, repeats: int) -> dict[str, Any]:
        """Copy between own memory and the mapped peer with the copy engines."""
        if self.imported is None:
            raise RuntimeError("no peer is mapped")
        own, peer = self._memory().data_ptr(), self.imported.address
        source, target = (own, peer) if push else (peer, own)
        lanes = [torch.cuda.Stream() for _ in range(streams)]
        part = self.size_bytes // streams
        rates = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for index, lane in enumerate(lanes):
                at = index * part
                check(driver.cuMemcpyDtoDAsync(target + at, source + at, part, lane.cuda_stream))
            torch.cuda.synchronize()
            rates.append(self.size_bytes / (time.perf_counter() - begin) / 1e9)
        return {"rates": rates}

    # -- staging -------------------------------------------------------------------------------
    def ipc_handle(self) -> str:
        """Export the memory as plain CUDA IPC."""
        handle = check(driver.cuIpcGetMemHandle(self._memory().data_ptr()))
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES).hex()

    def ipc_open(self, handle: str) -> str:
        """Import a peer's plain CUDA IPC memory."""
        opened = driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), bytes.fromhex(handle), IPC_HANDLE_BYTES)
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self.ipc_address = int(check(driver.cuIpcOpenMemHandle(opened, int(flag))))
        return hex(self.ipc_address)

    def ipc_push(self) -> None:
        """Copy the own memory into the imported one."""
        source = self._memory()
        check(driver.cuMemcpyDtoD(self.ipc_address, source.data_ptr(), self.size_bytes))
        torch.cuda.synchronize()

    def ipc_close(self) -> None:
        """Close the import."""
        check(driver.cuIpcCloseMemHandle(self.ipc_address))

    def facts(self) -> dict[str, Any]:
        """What this GPU says about sharing."""
        torch.cuda.synchronize()
        return {
            "fabric_supported": vmm.fabric_supported(),
            "free_bytes": torch.cuda.mem_get_info()[0],
        }


if __name__ == "__main__":
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    rank_process.serve(StreamRank(), Path(sys.argv[1]))
