"""Records come back as they went, large ones compressed; what is damaged is refused."""

from __future__ import annotations

import pytest

from dynamo_elastic.coordinator.records import RecordError, decode, encode
from dynamo_elastic.topology import Member, Topology
from dynamo_elastic.types import Epoch, Incarnation, WorkerId


def topology(ranks: int) -> Topology:
    members = (Member(WorkerId(f"slot{i}"), Incarnation(f"e{i}"), (i,)) for i in range(ranks))
    return Topology(Epoch(3), tuple(members))


@pytest.mark.parametrize("ranks", [0, 4, 1000, 5000])
def test_a_topology_comes_back(ranks: int) -> None:
    assert decode(Topology, encode(topology(ranks))) == topology(ranks)


def test_a_small_record_can_be_read_by_people_and_a_large_one_is_small() -> None:
    assert encode(topology(4)).startswith(b'{"schema_version":1,')
    assert len(encode(topology(5000))) < 100_000


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x00",
        encode(topology(4))[:-1],
        encode(topology(1000))[:-1],
        encode(topology(1000))[1:],
        b"{}",
    ],
)
def test_damage_is_told(damaged: bytes) -> None:
    with pytest.raises(RecordError, match="Topology"):
        decode(Topology, damaged)
