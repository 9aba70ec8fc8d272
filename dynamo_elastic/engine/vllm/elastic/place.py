"""Where a rank joins, as far as that is not what it was booted with: an image is of one rank of the
largest group, and its next life may be another rank, of a group at other ports. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_elastic.errors import ConfigError

_FIELDS: Mapping[str, tuple[type, tuple[str, ...]]] = {
    "data_parallel_rank": (int, ("data_parallel_rank", "data_parallel_index")),
    "data_parallel_address": (str, ("data_parallel_master_ip",)),
    "data_parallel_rpc_port": (int, ("data_parallel_rpc_port",)),
}
"""What a place may say, by the names of vLLM's flags -> its type, and the fields of vLLM's
ParallelConfig that it sets."""

PARALLEL_FIELDS = ("data_parallel_rank", "data_parallel_index", "data_parallel_rpc_port")
"""Those that rank 0 says nothing of."""


def parallel_of(place: Any) -> dict[str, Any]:
    """Fields of vLLM's ParallelConfig that a rank which joins at `place` has to set; {} sets none.
    Raises ConfigError naming all that it can't be told.

    >>> parallel_of({"data_parallel_rpc_port": 13345})
    {'data_parallel_rpc_port': 13345}
    """
    if not isinstance(place, Mapping):
        raise ConfigError([f"place: {place!r} is no mapping of {', '.join(_FIELDS)}"])
    found: dict[str, Any] = {}
    faults = []
    for name, value in place.items():
        kind, fields = _FIELDS.get(name, (None, ()))
        if kind is None:
            faults.append(f"{name}: unknown; a place has {', '.join(_FIELDS)}")
        elif type(value) is not kind or value == "" or (isinstance(value, int) and value < 0):
            faults.append(f"{name}: {value!r} is none; give {_WANTED[kind]}")
        else:
            found |= dict.fromkeys(fields, value)
    if faults:
        raise ConfigError(faults)
    return found


_WANTED = {int: "a number from 0 on", str: "an address"}
