"""Where a rank joins: what it may be told, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_elastic.engine.vllm.elastic.place import PARALLEL_FIELDS, parallel_of
from dynamo_elastic.errors import ConfigError


def test_a_place_sets_what_vllm_calls_it() -> None:
    place = {
        "data_parallel_rank": 2,
        "data_parallel_address": "10.0.0.1",
        "data_parallel_rpc_port": 13345,
    }
    assert parallel_of(place) == {
        "data_parallel_rank": 2,
        "data_parallel_index": 2,
        "data_parallel_master_ip": "10.0.0.1",
        "data_parallel_rpc_port": 13345,
    }
    assert set(PARALLEL_FIELDS) <= set(parallel_of(place))
    assert parallel_of({}) == {}


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ({"rank": 2}, "rank: unknown; a place has data_parallel_rank"),
        ({"data_parallel_rank": "2"}, "data_parallel_rank: '2' is none; give a number"),
        ({"data_parallel_rank": True}, "data_parallel_rank: True is none"),
        ({"data_parallel_rank": -1}, "data_parallel_rank: -1 is none"),
        ({"data_parallel_address": ""}, "data_parallel_address: '' is none; give an address"),
        ([1], "is no mapping"),
    ],
)
def test_what_can_not_be_a_place_is_named(place: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parallel_of(place)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parallel_of({"rank": 2, "data_parallel_rpc_port": ""})
    assert len(caught.value.faults) == 2
