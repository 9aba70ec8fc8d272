"""Sampling is a function of logits, seed and position."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.engine.reference.sampling import sample

LOGITS = np.linspace(-1, 1, 50, dtype=np.float32)


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 1 << 20))
def test_the_same_key_draws_the_same_token(seed: int, position: int) -> None:
    first = sample(LOGITS, seed=seed, position=position, temperature=1.0)
    assert first == sample(LOGITS, seed=seed, position=position, temperature=1.0)
    assert 0 <= first < len(LOGITS)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    draws = [sample(logits, seed=1, position=p, temperature=1.0) for p in range(4000)]
    shares = np.bincount(draws, minlength=3) / len(draws)
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.03)


def test_temperature_zero_takes_the_most_likely() -> None:
    assert sample(LOGITS, seed=3, position=4, temperature=0.0) == 49
