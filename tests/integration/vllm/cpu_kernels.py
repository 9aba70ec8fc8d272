"""Kernels of vLLM for a machine that any sandbox is: some say that they have AMX, and end whoever
uses it. Imported before vLLM, which chooses as it is imported and can't choose twice in a process:
by the programs of the ranks, whose spawned processes run them again before anything else."""

from __future__ import annotations

import torch

torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
