"""Small blocks that are shared after a checkpoint: the driver's rule, and the way around it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dynamo_elastic.snapshot.cuda_process import Cuda
from dynamo_elastic.snapshot.nvml import Nvml
from dynamo_elastic.snapshot.park import park, unpark
from dynamo_elastic.testing.cuda_victim import CudaVictim
from dynamo_elastic.testing.snapshot_world import CLEAN

TIMEOUT_S = 30.0


@pytest.mark.gpu(2)
def test_peers_open_fresh_blocks_of_a_process_that_was_parked() -> None:
    driver, inventory = Cuda.open(), Nvml.open()
    first, second = (gpu.uuid for gpu in inventory.gpus()[:2])
    with CudaVictim(visible=first) as peer, CudaVictim(visible=second) as sharer:
        assert peer.ask("look", sharer.ask("share_block", "any")) == "seen"
        for _ in range(2):
            parked = park(sharer.process, driver, inventory, engine=CLEAN, timeout_s=TIMEOUT_S)
            unpark(parked, driver, inventory, timeout_s=TIMEOUT_S)
            # If a new driver permits it, comm/fresh_blocks.py has become needless.
            assert peer.ask("look", sharer.ask("share_block", "any")) == "not permitted"
            assert peer.ask("look", sharer.ask("share_block", "fresh")) == "seen"


@pytest.mark.gpu(1)
def test_a_thread_that_has_not_used_cuda_gets_blocks() -> None:
    import torch

    from dynamo_elastic.comm.fresh_blocks import DriverHeap, fresh_blocks

    torch.zeros(1, device="cuda")

    def blocks() -> int:
        heap = DriverHeap(torch.cuda.current_device())
        with fresh_blocks(heap):
            address = heap.allocate(8)
        heap.free(address)
        return address

    # An expert buffer in place of a spent one is made by such a thread.
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(blocks).result(TIMEOUT_S) > 0
