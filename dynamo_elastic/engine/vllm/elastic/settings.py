"""What of our elastic expert parallelism can be set, by environment, as vLLM's own plugins do it:
its processes are started by vLLM, and inherit nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from dynamo_elastic.errors import ConfigError

PREFIX = "DYNAMO_ELASTIC_VLLM_"


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """Deadlines and choices of one rank; equal on all ranks of a group."""

    prepare_timeout_s: float = 240.0
    """For everybody who takes part to arrive; a joiner that boots cold needs minutes."""
    group_timeout_s: float = 20.0
    """To connect a group once all have arrived, and for each exchange while it is prepared."""
    commit_timeout_s: float = 0.8
    """For a joiner in the first exchange on the new group, before anything of the old one is given
    up; and then to come to resume. Counted from when all who serve are there."""
    fault_timeout_s: float = 0.4
    """After a step that failed because a rank died: for those who live to say so. Who has not is
    done without."""
    step_timeout_s: float = 60.0
    """For a rank that serves to come to an exchange in which others wait for it; who does not is
    taken for dead. Longer than one is ever behind the others, also when it compiles something."""
    poll_s: float = 0.005
    """Between two looks at the store."""
    rebalance_after_steps: int = 100
    """From a commit to the first rebalancing of experts, in steps of the engine."""
    park_leavers: bool = False
    """A rank that leaves lets go of its peers and lives on, to be parked; else it ends."""
    detached: bool = False
    """A rank boots without a group, to be parked or put into an image, and joins one later."""
    http_port: int = 0
    """Where a rank that booted without a group listens for HTTP; 0: as its flags say. In the
    environment of its identity, so that copies of an image listen on ports of their own."""
    rebind_graphs: bool = True
    """A rank that comes back goes on with the graphs that it has; else it captures them again."""

    def step_timeout(self, given: timedelta | None) -> timedelta:
        """`step_timeout_s`, unless vLLM's `--cpu-distributed-timeout-seconds` is given."""
        return timedelta(seconds=self.step_timeout_s) if given is None else given

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> ElasticSettings:
        """DYNAMO_ELASTIC_VLLM_PREPARE_TIMEOUT_S and so on. Raises ConfigError naming all that are
        unknown, no numbers above 0, or neither 0 nor 1 where that is asked."""
        given = os.environ if environment is None else environment
        known = {f"{PREFIX}{f.name.upper()}": f for f in fields(cls)}
        faults: list[str] = []
        values: dict[str, Any] = {}
        for variable in sorted(name for name in given if name.startswith(PREFIX)):
            field = known.get(variable)
            if field is None:
                faults.append(f"{variable}: unknown; there are {', '.join(sorted(known))}")
                continue
            read, wanted = _READERS[str(field.type)]
            value = read(given[variable])
            if value is None:
                faults.append(f"{variable}: {given[variable]!r} is {wanted}")
            else:
                values[field.name] = value
        if faults:
            raise ConfigError(faults)
        return cls(**values)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def _count(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "float": (_number, "no number above 0"),
    "int": (_count, "no number above 0"),
    "bool": ({"0": False, "1": True}.get, "neither 0 nor 1"),
}
