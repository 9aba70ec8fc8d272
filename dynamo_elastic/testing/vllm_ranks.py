"""Ranks of vLLM 0.33's own code in another environment, told what to do by JSON lines."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from torch._C._distributed_c10d import TCPStore

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm-elastic" / "bin" / "python"
IMPORT_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 90.0
_ports = itertools.count(23456 + os.getpid() % 3000)


class Ranks:
    """The forks of elastic_ranks.py."""

    missing: list[str]
    """Hooks of the adapter that their vLLM lacks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """`process` has both pipes."""
        self._process = process
        self._words_in: Any = process.stdin
        self._words_out: Any = process.stdout
        self._said: list[dict[str, Any]] = []
        self._queue: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._words_out:
            if line.startswith("{"):  # vLLM's own words go there too
                self._queue.put(json.loads(line))

    def finish(self) -> None:
        """They end, and nothing of them is left open."""
        self._words_in.close()
        self._process.wait(timeout=90)
        self._reader.join(timeout=10)
        self._words_out.close()

    def tell(self, **command: Any) -> None:
        self.say(json.dumps(command))

    def say(self, line: str) -> None:
        self._words_in.write(line + "\n")
        self._words_in.flush()

    def hear(
        self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        """The first words like that; others are kept for later."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for said in self._said:
                if wanted(said):
                    self._said.remove(said)
                    return said
            try:
                self._said.append(self._queue.get(timeout=max(0.1, deadline_s - time.monotonic())))
            except Empty:
                raise AssertionError(f"nobody said it; unread: {self._said}") from None

    def answer(self, rank: int) -> dict[str, Any]:
        return self.hear(lambda w: w.get("from") == rank and "width" in w and "attached" not in w)

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.tell(kill=rank)
        for rank in ranks:
            self.hear(lambda w, r=rank: w.get("from") == r and w.get("gone"))  # type: ignore[misc]


class Group:
    """Ranks that serve, and those that join them."""

    def __init__(
        self,
        ranks: Ranks,
        size: int = 2,
        *,
        faults: Mapping[int, str] | None = None,
        **environment: str,
    ) -> None:
        """`faults`, by rank: see elastic_ranks.py."""
        self._ranks = ranks
        self._environment = environment
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.rpc_port = next(_ports)
        self.alive = set(range(size))
        for rank in range(size):
            self._start(rank, size, joins=False, fault=(faults or {}).get(rank, ""))
        for rank in range(size):
            ranks.hear(lambda w, r=rank: w.get("up") == r)  # type: ignore[misc]

    def _start(self, rank: int, size: int, *, joins: bool, fault: str = "") -> None:
        seat = {
            "rank": rank, "size": size, "port": 0 if joins else self._store.port, "joins": joins,
            "rpc_port": self.rpc_port, "fault": fault, "environment": self._environment,
        }  # fmt: skip
        self._ranks.tell(start=seat)

    def join(self, fault: str = "") -> None:
        self._start(2, 3, joins=True, fault=fault)
        self.alive.add(2)

    def scale(self, width: int, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
        self.tell_scale(width, ranks)
        return self.hear_scale(ranks)

    def tell_scale(self, width: int, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            self._ranks.tell(to=rank, do="scale", width=width)

    def hear_scale(self, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
        return [self._ranks.answer(rank) for rank in ranks]

    def facts(self, rank: int) -> dict[str, Any]:
        self._ranks.tell(to=rank, do="facts")
        return self._ranks.answer(rank)

    def abort(self, rank: int, why: str) -> None:
        self._ranks.tell(to=rank, do="abort", why=why)
        self._ranks.answer(rank)

    def lose(self, *ranks: int) -> None:
        self._ranks.end(*ranks)
        self.alive -= set(ranks)


def start_ranks(script: Path, log: Path) -> Ranks:
    """The process that forks them, with all that it imports."""
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "VLLM_LOGGING_LEVEL": "WARNING",
        # On a host that is busy with other tests, a commit may take its time.
        "DYNAMO_ELASTIC_VLLM_COMMIT_TIMEOUT_S": "3",
        "DYNAMO_ELASTIC_VLLM_PREPARE_TIMEOUT_S": "30",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [PYTHON, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
            text=True, env=environment,
        )  # fmt: skip
    found = Ranks(process)
    found.missing = found.hear(lambda words: "ready" in words, IMPORT_TIMEOUT_S)["missing"]
    return found
