"""What of an allocation is kept: all that no tensor covers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.engine.vllm.elastic.spans import Range, of_tensor, without

ranges = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda r: (min(r), max(r)))


@given(ranges, st.lists(ranges, max_size=6))
def test_each_byte_is_kept_or_dropped(whole: Range, dropped: list[Range]) -> None:
    kept = list(without(whole, dropped))
    expected = {at for at in range(*whole) if not any(a <= at < b for a, b in dropped)}
    assert {at for part in kept for at in range(*part)} == expected
    assert sum(b - a for a, b in kept) == len(expected)
    assert kept == sorted(kept)


def test_a_tensor_covers_all_that_it_can_touch() -> None:
    whole = torch.zeros(6, 4, dtype=torch.float32)
    start = whole.data_ptr()
    assert of_tensor(whole) == (start, start + 96)
    assert of_tensor(whole.t()) == (start, start + 96)
    assert of_tensor(whole[1:3, 1:3]) == (start + 20, start + 44)
    assert of_tensor(whole[6:]) in {(start + 96, start + 96), (0, 0)}
