"""Who goes on after a joint step has failed because a rank died: what each rank that lives says of
itself, and what follows from that. Pure.

vLLM numbers ranks without gaps, rank 0 keeps the store, and a rank can't change its number. So
those below the lowest rank that died can go on, if they have every expert between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

FAULT_KEY, VERDICT_KEY = "dynamo_elastic/fault/any", "dynamo_elastic/fault/verdict"
"""That a step of somebody has failed; and what follows from it."""


def word_key(rank: int) -> str:
    """Where a rank says its Word, on the store of the group that failed."""
    return f"dynamo_elastic/fault/{rank}"


@dataclass(frozen=True, slots=True)
class Word:
    """Of a rank that has thrown the failed step away, and rests."""

    complete: int
    """How many first ranks have every expert, as this rank knows it; 0 if it can't be known, as
    experts were on their way."""
    placement: str
    """Digest of where it believes the experts to be."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ranks below `size` go on; the others end."""

    size: int
    reason: str
    """Why others end; of all, if `size` is 0."""


def judge(size: int, words: Mapping[int, Word]) -> Verdict:
    """What becomes of a group of `size`, of which those in `words` live; rank 0 is one of them.

    >>> judge(3, {0: Word(1, "a"), 1: Word(1, "a")})
    Verdict(size=2, reason='rank 2 died')
    """
    left = next((rank for rank in range(size) if rank not in words), size)
    if left == size:
        return Verdict(0, "every rank lives, so no death explains the failed step")
    died = f"rank {left} died"
    said = [words[rank] for rank in range(left)]
    if not all(word.complete for word in said) or len({word.placement for word in said}) > 1:
        return Verdict(0, f"{died} while experts were on their way between ranks")
    needed = max(word.complete for word in said)
    if needed > left:
        return Verdict(0, f"{died}, and the ranks below it have not every expert")
    return Verdict(left, died)


def encoded(said: Word | Verdict) -> str:
    return msgspec.json.encode(said).decode()


def decoded_word(text: str | bytes) -> Word:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Word)


def decoded_verdict(text: str | bytes) -> Verdict:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Verdict)
