"""What the tokens of a request must be: one rank, one sequence, no scheduler.

Tests and the demo compare what elastic ranks said with this, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dynamo_elastic.engine.base import Request
from dynamo_elastic.engine.reference.checkpoint import load_weights
from dynamo_elastic.engine.reference.experts import LocalExperts, weighted_sum
from dynamo_elastic.engine.reference.kv import KvCache
from dynamo_elastic.engine.reference.model import Model, Routing, Row, TileSize, Weights
from dynamo_elastic.engine.reference.sampling import sample
from dynamo_elastic.engine.reference.store import HOST, Store
from dynamo_elastic.engine.shape import read_shape


class Oracle:
    """A whole model in this process. `tile` must be that of the engines it judges, and `store` of
    their kind; on a GPU bits depend on the kernels, so its logits are near theirs, not equal."""

    def __init__(self, model_dir: Path, tile: TileSize, store: Store = HOST) -> None:
        torch.set_num_threads(1)
        shape = read_shape(model_dir)
        weights = Weights(shape, shape.num_experts, store)
        load_weights(model_dir, weights, range(shape.num_experts))
        self._model = Model(weights, tile)
        self._experts = LocalExperts(weights, tile.batch_tokens)
        self._cache = KvCache(shape, tile.context_blocks, store)
        self._blocks = list(range(1, 1 + tile.context_blocks))

    def generate(self, request: Request) -> tuple[int, ...]:
        """The tokens that follow the prompt, a stop token included."""
        tokens = list(request.prompt)
        computed = 0
        while len(tokens) - len(request.prompt) < request.max_tokens:
            logits = self.logits(tokens, computed)
            computed = len(tokens)
            tokens.append(
                sample(
                    logits.numpy(),
                    seed=request.seed,
                    position=len(tokens),
                    temperature=request.temperature,
                )
            )
            if tokens[-1] in request.stop_tokens:
                break
        return tuple(tokens[len(request.prompt) :])

    def logits(self, tokens: list[int], computed: int = 0) -> Tensor:
        """Logits after the last of `tokens`, of which the first `computed` are in the cache; on the
        host."""
        rows = self._model.tile.batch_tokens
        for start in range(computed, len(tokens), rows):
            end = min(start + rows, len(tokens))
            tile = [Row(tokens[p], p, self._blocks) for p in range(start, end)]
            result = self._model.forward(tile, self._cache, self._run_experts)[len(tile) - 1]
        return result.cpu()

    def _run_experts(self, routing: Routing) -> Tensor:
        size = (*routing.experts.shape, routing.hidden.shape[1])
        computed = torch.zeros(size, device=routing.hidden.device)
        for row in range(routing.live):
            for choice, expert in enumerate(routing.experts[row].tolist()):
                given = routing.hidden[row : row + 1]
                computed[row, choice] = self._experts.compute(expert, routing.layer, given)[0]
        return weighted_sum(computed, routing.weights).to(routing.hidden.dtype)
