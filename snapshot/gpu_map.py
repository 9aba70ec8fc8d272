"""Which GPU takes the place of which when a process is restored."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dynamo_elastic.errors import CudaError

_INVALID_VALUE = 1


def moves(gpu_map: Mapping[str, str] | None, gpus: Collection[str], pid: int) -> dict[str, str]:
    """Old uuid -> new for every GPU; {} if each keeps its place, which is the driver's faster way.

    The driver wants all GPUs of the host, whatever CUDA_VISIBLE_DEVICES says. Raises CudaError,
    before it is asked, of a map that is no permutation of `gpus`.
    """
    if gpu_map is None or all(old == new for old, new in gpu_map.items()):
        return {}
    faults = [
        *(f"{uuid} is missing" for uuid in sorted(set(gpus) - set(gpu_map))),
        *(f"{uuid} is no GPU of this host" for uuid in sorted(set(gpu_map) - set(gpus))),
    ]
    if not faults and sorted(gpu_map.values()) != sorted(gpus):
        faults = ["two GPUs go to one place, or one to none"]
    if faults:
        raise CudaError(
            "restore",
            pid,
            code=_INVALID_VALUE,
            name="CUDA_ERROR_INVALID_VALUE",
            state="checkpointed",
            why=f"the GPU map must be a permutation of all {len(gpus)} GPUs: {'; '.join(faults)}",
        )
    return dict(gpu_map)
