"""Park the ranks that have left a group of ours, and bring them back: what they hold, how long."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.snapshot.cuda_process import Cuda
from dynamo_elastic.snapshot.nvml import Nvml
from dynamo_elastic.snapshot.park import ParkedReport, park, unpark
from dynamo_elastic.snapshot.process import ProcessRef, identify

_TIMEOUT_S = 60.0
_QUIET: dict[str, Any] = {"cuda": {"multicast": 0, "ipc_imports": 0, "managed_bytes": 0}}
"""What a rank that has let go says of itself."""


class Parking:
    """Process trees of ranks, parked and brought back by the driver. Who is parked is in a file,
    for the command that comes next."""

    def __init__(self, path: Path) -> None:
        self._driver, self._inventory = Cuda.open(), Nvml.open()
        self._path = path
        self._parked: dict[int, ParkedReport] = {}
        if path.exists():
            said = json.loads(path.read_text())
            self._parked = {int(rank): parked_report(values) for rank, values in said.items()}

    def park(self, pids: Mapping[int, int]) -> dict[Any, Any]:
        """rank -> what parking its tree took, or why it could not be; and what of each GPU is
        in use after that, by whomever."""
        found: dict[Any, Any] = {rank: self._park(rank, pid) for rank, pid in pids.items()}
        self._save()
        return found | {"gpus": [asdict(gpu) for gpu in self._inventory.gpus()]}

    def _park(self, rank: int, pid: int) -> dict[str, Any]:
        process = identify(pid)
        if process is None:
            return {"failed": f"process {pid} is gone"}
        found: dict[str, Any] = {"tree": _tree(pid)}
        try:
            began_s = time.monotonic()
            parked = park(
                process, self._driver, self._inventory, engine=_QUIET, timeout_s=_TIMEOUT_S
            )
            self._parked[rank] = parked
            return found | {"park_s": time.monotonic() - began_s, "parked": asdict(parked)}
        except ElasticError as exc:
            return found | {"failed": f"{type(exc).__name__}: {exc}"[:500]}

    def bring_back(self, rank: int) -> dict[str, float]:
        """Seconds by part; {} if it was not parked. Raises ElasticError."""
        parked = self._parked.pop(rank, None)
        if parked is None:
            return {}
        self._save()
        return unpark(parked, self._driver, self._inventory, timeout_s=_TIMEOUT_S)

    def _save(self) -> None:
        said = {rank: asdict(parked) for rank, parked in self._parked.items()}
        self._path.write_text(json.dumps(said, indent=1) + "\n")


def parked_report(values: Mapping[str, Any]) -> ParkedReport:
    """As it was before asdict() and JSON."""
    process = ProcessRef(**values["process"])
    frozen = tuple(ProcessRef(**each) for each in values["frozen"])
    return ParkedReport(**{**values, "process": process, "frozen": frozen})


def _tree(pid: int) -> dict[int, str]:
    """Processes of the session that `pid` leads, and what they are."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if os.getsid(int(entry.name)) == pid:
                    found[int(entry.name)] = (entry / "cmdline").read_text()[:60].replace("\0", " ")
            except OSError:
                continue
    return found
