"""What a captured step reads is there whenever it is replayed."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dynamo_elastic.comm.base import ExpertBuffer
from dynamo_elastic.engine.reference.gpu_experts import BufferExperts, ExpertStacks
from dynamo_elastic.engine.reference.gpu_kernels import PLAIN


def test_a_graph_reads_no_tensor_that_ends_with_the_experts_it_was_captured_from() -> None:
    """A graph holds addresses, and StepGraphs makes these objects anew for every buffer: row
    numbers that one of them owned were overwritten, and experts looked up with what came after."""
    table, tile = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)
    stacks = ExpertStacks((torch.zeros(1, 2, 2),), (torch.zeros(1, 2, 1),))
    experts = BufferExperts(cast(ExpertBuffer, None), stacks, table, tile, PLAIN)
    held = [value for value in vars(experts).values() if isinstance(value, Tensor)]
    assert len(held) == 2
    assert all(value is table or value is tile for value in held)
