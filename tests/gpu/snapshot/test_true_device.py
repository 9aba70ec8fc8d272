"""A process that comes back on another GPU may say it is on the old one; NVML knows better.

What it says differs: with one GPU visible the driver answers with the new UUID, with all of them
visible it went on with the old one. So nobody asks it.
"""

from __future__ import annotations

import pytest

from dynamo_elastic.snapshot.cuda_process import Cuda
from dynamo_elastic.snapshot.gpu import true_devices
from dynamo_elastic.snapshot.nvml import Nvml
from dynamo_elastic.snapshot.park import park, unpark
from dynamo_elastic.testing.cuda_victim import CudaVictim
from dynamo_elastic.testing.snapshot_world import CLEAN

pytestmark = pytest.mark.gpu(2)

TIMEOUT_S = 30.0


def test_true_device_of_a_process_that_was_moved() -> None:
    driver, inventory = Cuda.open(), Nvml.open()
    gpus = inventory.gpus()
    first, second = gpus[:2]
    swapped = {gpu.uuid: gpu.uuid for gpu in gpus}
    swapped |= {first.uuid: second.uuid, second.uuid: first.uuid}
    with CudaVictim(visible=first.uuid) as victim:
        assert true_devices(inventory, victim.pid)[0].uuid == first.uuid

        parked = park(victim.process, driver, inventory, engine=CLEAN, timeout_s=TIMEOUT_S)
        assert true_devices(inventory, victim.pid) == ()
        unpark(parked, driver, inventory, gpu_map=swapped, timeout_s=TIMEOUT_S)

        (found,) = true_devices(inventory, victim.pid)
        assert (found.uuid, found.pci_bus_id) == (second.uuid, second.pci_bus_id)
        assert victim.ask("check") == "right"

        parked = park(victim.process, driver, inventory, engine=CLEAN, timeout_s=TIMEOUT_S)
        unpark(parked, driver, inventory, gpu_map=swapped, timeout_s=TIMEOUT_S)
        assert true_devices(inventory, victim.pid)[0].uuid == first.uuid
        assert victim.ask("check") == "right"
