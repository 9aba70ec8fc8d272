"""What Dynamo's etcd keys say of our instances: cards, read back as its clients read them."""

from __future__ import annotations

import asyncio
import json

from dynamo_elastic.coordinator.status import Status
from dynamo_elastic.coordinator.store import Store
from dynamo_elastic.dynamo.base import RUNTIME_DATA_KEY
from dynamo_elastic.errors import ElasticError

Card = dict[str, str]
_TIMEOUT_S = 15.0


def instances_of(namespace: str) -> str:
    """Prefix of the keys that routers and planner take for our ranks."""
    return f"v1/instances/{namespace}/backend/generate/"


async def all_cards(store: Store, namespace: str) -> dict[str, Card]:
    """Instance id (hexadecimal) -> runtime data. Raises ElasticError if an instance has no card, a
    card no instance, or a card names more than one data-parallel rank."""
    keys = [v.key for v in await store.get_prefix(instances_of(namespace))]
    instances = {key.rpartition("/")[2] for key in keys}
    found: dict[str, Card] = {}
    for stored in await store.get_prefix(f"v1/mdc/{namespace}/backend/generate/"):
        name = stored.key.rpartition("/")[2]
        config = json.loads(stored.value)["card_json"]["runtime_config"]
        if config["data_parallel_size"] not in (None, 1) or config["data_parallel_start_rank"]:
            raise ElasticError(f"card {name} is not of one rank: {config}")
        found[name] = json.loads(config["runtime_data"][RUNTIME_DATA_KEY])
    if found.keys() != instances:
        raise ElasticError(f"instances {sorted(instances)}, cards {sorted(found)}")
    return found


async def read_cards(store: Store, namespace: str, status: Status) -> list[Card]:
    """The cards, once they are those of the topology in force, rank by rank, and no others. Raises
    ElasticError if they do not become so."""
    in_force, last = status.in_force, ""
    expected = sorted(
        (str(rank), m.incarnation) for rank, m in enumerate(in_force.members if in_force else ())
    )
    epoch = str(in_force.epoch) if in_force else ""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                try:
                    cards = list((await all_cards(store, namespace)).values())
                except ElasticError as exc:
                    last = str(exc)
                else:
                    now = sorted((c["rank"], c["incarnation"]) for c in cards)
                    if now == expected and {c["epoch"] for c in cards} == {epoch}:
                        return cards
                    last = f"cards {cards}, in force epoch {epoch}: {expected}"
                await asyncio.sleep(0.05)
    except TimeoutError as exc:
        raise ElasticError(f"cards are not as the topology is: {last}") from exc
