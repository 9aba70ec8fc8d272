"""Scale operations of vLLM 0.33's own code with ours in it: they end well, or change nothing."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

pytestmark = [pytest.mark.vllm_elastic, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm-elastic" / "bin" / "python"
IMPORT_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 90.0
_ports = itertools.count(23456 + os.getpid() % 3000)


class Ranks:
    """The forks of elastic_ranks.py."""

    missing: list[str]
    """Hooks of the adapter that their vLLM lacks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._said: list[dict[str, Any]] = []
        self._queue: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._queue.put(json.loads(line))

    def finish(self) -> None:
        """They end, and nothing of them is left open."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._reader.join(timeout=10)
        self._process.stdout.close()

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

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
    """Two ranks that serve, and those that join them."""

    def __init__(self, ranks: Ranks, **environment: str) -> None:
        self._ranks = ranks
        self._environment = environment
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._rpc_port = next(_ports)
        self.alive = {0, 1}
        for rank in (0, 1):
            self._start(rank, 2, joins=False)
        for rank in (0, 1):
            ranks.hear(lambda w, r=rank: w.get("up") == r)  # type: ignore[misc]

    def _start(self, rank: int, size: int, *, joins: bool, fault: str = "") -> None:
        seat = {
            "rank": rank, "size": size, "port": 0 if joins else self._store.port, "joins": joins,
            "rpc_port": self._rpc_port, "fault": fault, "environment": self._environment,
        }  # fmt: skip
        self._ranks.tell(start=seat)

    def join(self, fault: str = "") -> None:
        self._start(2, 3, joins=True, fault=fault)
        self.alive.add(2)

    def scale(self, width: int, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
        for rank in ranks:
            self._ranks.tell(to=rank, do="scale", width=width)
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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "VLLM_LOGGING_LEVEL": "WARNING",
        # On a host that is busy with other tests, a commit may take its time.
        "DYNAMO_ELASTIC_VLLM_COMMIT_TIMEOUT_S": "3",
        "DYNAMO_ELASTIC_VLLM_PREPARE_TIMEOUT_S": "30",
    }
    log = (tmp_path_factory.mktemp("ranks") / "log").open("w")
    process = subprocess.Popen(
        [PYTHON, Path(__file__).parent / "elastic_ranks.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
    )  # fmt: skip
    found = Ranks(process)
    found.missing = found.hear(lambda words: "ready" in words, IMPORT_TIMEOUT_S)["missing"]
    yield found
    found.finish()
    log.close()


@pytest.fixture
def group(ranks: Ranks) -> Iterator[Group]:
    made = Group(ranks)
    yield made
    made.lose(*sorted(made.alive))


def test_this_vllm_has_every_hook(ranks: Ranks) -> None:
    assert ranks.missing == []


def test_up_and_down_and_up(group: Group) -> None:
    for _ in range(2):
        group.join()
        for answer in group.scale(3, (0, 1)):
            assert (answer["error"], answer["width"], answer["scaling"]) == ("", 3, False)
        joiner, retained = group.facts(2), group.facts(0)
        assert joiner["dense"] == pytest.approx(retained["dense"])
        assert joiner["scales"] == retained["scales"] == 10
        assert joiner["mapping"] == [[0, 1, 2, 3]] * 2
        assert joiner["tokens"] > 0
        *stay, leaver = group.scale(2, (0, 1, 2))
        assert [(a["error"], a["width"]) for a in stay] == [("", 2)] * 2
        assert leaver["error"] == ""
        group.lose(2)


@pytest.mark.parametrize("fault", ["stream", "ready", "stop-ready", "resume", "stop-resume"])
def test_a_joiner_that_fails_costs_nothing(group: Group, fault: str) -> None:
    group.join(fault)
    for answer in group.scale(3, (0, 1)):
        assert answer["error"]
        assert (answer["width"], answer["scaling"]) == (2, False)
        assert answer["still_s"] < 1
    group.lose(2)
    before = group.facts(0)["tokens"]
    group.join()
    for answer in group.scale(3, (0, 1)):
        assert (answer["error"], answer["width"]) == ("", 3)
    assert group.facts(0)["tokens"] > before


@pytest.mark.parametrize("fault", ["hello", "engines", "groups"])
def test_a_joiner_whose_death_is_told_is_not_waited_for(group: Group, fault: str) -> None:
    group.join(fault)
    for rank in (0, 1):
        group._ranks.tell(to=rank, do="scale", width=3)
    group._ranks.hear(lambda w: w.get("from") == 2 and bool(w.get("gone")))
    group.alive.discard(2)
    began_s = time.monotonic()
    group._ranks.tell(to=0, do="tell-failure", why="its process ended")
    answers = [group._ranks.answer(rank) for rank in (0, 1)]
    assert all("its process ended" in answer["error"] for answer in answers)
    assert time.monotonic() - began_s < 10  # of the 30 s that it would have had
    group.join()
    assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]


def test_nobody_who_joins_is_given_up_at_the_deadline(ranks: Ranks) -> None:
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PREPARE_TIMEOUT_S="3")
    try:
        for answer in group.scale(3, (0, 1)):
            assert answer["error"]
            assert (answer["width"], answer["scaling"]) == (2, False)
            assert 2.5 < answer["s"] < 15
    finally:
        group.lose(0, 1)


def test_a_leaver_comes_back(ranks: Ranks) -> None:
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    try:
        group.join()
        assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
        for _ in range(2):
            assert [a["error"] for a in group.scale(2, (0, 1, 2))] == ["", "", ""]
            tokens = group.facts(2)["tokens"]
            ranks.tell(to=2, do="attach")
            assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
            attached = ranks.hear(lambda w: bool(w.get("attached")))
            assert attached["error"] == ""
            back, retained = group.facts(2), group.facts(0)
            assert back["dense"] == pytest.approx(retained["dense"])
            assert back["scales"] == retained["scales"]
            assert back["mapping"] == [[0, 1, 2, 3]] * 2
            assert back["tokens"] > tokens
            assert back["width"] == retained["width"] == 3
    finally:
        group.lose(*sorted(group.alive))


def test_one_rank_serves_alone_and_is_joined_again(ranks: Ranks) -> None:
    """Each rank has slots for all experts, so that one is enough."""
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    try:
        for _ in range(2):
            assert [a["error"] for a in group.scale(1, (0, 1))] == ["", ""]
            alone = group.facts(0)
            assert alone["width"] == 1
            ranks.tell(to=1, do="attach")
            (answer,) = group.scale(2, (0,))
            assert (answer["error"], answer["width"]) == ("", 2)
            assert answer["tokens"] > alone["tokens"]
            attached = ranks.hear(lambda w: bool(w.get("attached")))
            assert attached["error"] == ""
            assert group.facts(1)["dense"] == pytest.approx(group.facts(0)["dense"])
    finally:
        group.lose(*sorted(group.alive))


def test_a_leaver_lets_go_and_lives_on(ranks: Ranks) -> None:
    group = Group(ranks, DYNAMO_ELASTIC_VLLM_PARK_LEAVERS="1")
    try:
        group.join()
        assert [a["error"] for a in group.scale(3, (0, 1))] == ["", ""]
        assert [a["error"] for a in group.scale(2, (0, 1, 2))] == ["", "", ""]
        leaver = group.facts(2)
        assert (leaver["width"], leaver["let_go"]) == (0, True)
        serving = group.facts(0)["tokens"]
        assert group.facts(2)["tokens"] == leaver["tokens"]
        assert group.facts(0)["tokens"] >= serving
    finally:
        group.lose(*sorted(group.alive))
