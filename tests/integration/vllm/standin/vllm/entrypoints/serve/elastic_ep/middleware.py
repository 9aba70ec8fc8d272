"""Whether a rank is retired is known to the rank itself here."""

from __future__ import annotations


def set_elastic_ep_rank_retired(_: bool) -> None:
    """See cli.main.Rank."""
