"""Which token comes next: a function of logits, seed and absolute position, and nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SEED_MASK = (1 << 64) - 1


def sample(logits: NDArray[np.float32], *, seed: int, position: int, temperature: float) -> int:
    """Draw the token that stands at `position` from `logits` (shape: vocab_size).

    The noise comes from a counter-based generator keyed by (seed, position), so any rank draws the
    same token. Temperature 0 takes the most likely one.
    """
    if temperature == 0:
        return int(np.argmax(logits))
    counter = np.array([0, 0, 0, position], dtype=np.uint64)
    noise = np.random.Generator(np.random.Philox(key=seed & _SEED_MASK, counter=counter))
    scores = logits.astype(np.float64) / temperature + noise.gumbel(size=logits.shape)
    return int(np.argmax(scores))
