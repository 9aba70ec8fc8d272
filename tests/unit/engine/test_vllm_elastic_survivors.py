"""Who goes on after a joint step has failed: never without an expert, nor with two opinions of
where they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_elastic.engine.vllm.elastic.survivors import (
    Verdict,
    Word,
    decoded_verdict,
    decoded_word,
    encoded,
    judge,
)

WORDS = st.builds(Word, st.integers(0, 5), st.sampled_from(["a", "b"]))


@pytest.mark.parametrize(
    ("words", "size", "reason"),
    [
        ({0: Word(2, "a"), 1: Word(2, "a")}, 2, "rank 2 died"),
        ({0: Word(1, "a"), 2: Word(1, "a")}, 1, "rank 1 died"),
        ({r: Word(1, "a") for r in range(3)}, 0, "every rank lives"),
        ({0: Word(3, "a"), 1: Word(3, "a")}, 0, "have not every expert"),
        ({0: Word(2, "a"), 1: Word(2, "b")}, 0, "on their way"),
        ({0: Word(2, "a"), 1: Word(0, "a")}, 0, "on their way"),
        ({0: Word(1, "a"), 2: Word(1, "b")}, 1, "rank 1 died"),
    ],
)
def test_of_three_ranks(words: dict[int, Word], size: int, reason: str) -> None:
    verdict = judge(3, words)
    assert verdict.size == size
    assert reason in verdict.reason


@given(st.integers(2, 6), st.dictionaries(st.integers(1, 5), WORDS), WORDS)
def test_who_goes_on_has_all_experts_and_one_opinion(
    size: int, others: dict[int, Word], first: Word
) -> None:
    words = {0: first} | {rank: word for rank, word in others.items() if rank < size}
    verdict = judge(size, words)
    assert verdict.size < size
    assert verdict.reason
    stay = [words[rank] for rank in range(verdict.size)]  # each of them has said a word
    assert len({word.placement for word in stay}) <= 1
    assert all(0 < word.complete <= verdict.size for word in stay)


def test_words_and_verdicts_go_over_the_store() -> None:
    assert decoded_word(encoded(Word(2, "a"))) == Word(2, "a")
    assert decoded_verdict(encoded(Verdict(2, "rank 2 died"))) == Verdict(2, "rank 2 died")
