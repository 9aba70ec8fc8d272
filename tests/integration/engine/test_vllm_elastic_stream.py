"""Weights of a joiner over real NIXL, from a process to another, through small staging buffers."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.engine.vllm.elastic.groups import open_store
from dynamo_elastic.engine.vllm.elastic.meeting import GivenUp, Meeting, Words
from dynamo_elastic.engine.vllm.elastic.stream import Stream
from dynamo_elastic.errors import TransferError

HOST = "127.0.0.1"
TIMEOUT_S = 20.0


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def end_of(store: TCPStore, over: threading.Event | None = None) -> Stream:
    client: Any = open_store(HOST, store.port, TIMEOUT_S)
    meeting = Meeting(client, timeout_s=TIMEOUT_S, over=over)
    agent = NixlAgent(f"weights-{uuid.uuid4().hex}")
    cpu = torch.device("cpu")
    words = Words(client, meeting)
    return Stream(words, "weights/2", agent, cpu, timeout_s=TIMEOUT_S, staging_bytes=1 << 10)


def weights(filled: bool) -> dict[str, torch.Tensor]:
    made = {
        "dense": torch.randn(300, 7, generator=torch.Generator().manual_seed(1)).t(),
        "half": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "count": torch.tensor(7),
        "none": torch.zeros(0),
        "flags": torch.tensor([True, False, True]),
    }
    return made if filled else {name: torch.zeros_like(t) for name, t in made.items()}


def test_weights_arrive_whatever_their_layout(store: TCPStore) -> None:
    sent, received = weights(True), weights(False)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(end_of(store).send, sent)
        receiving = pool.submit(end_of(store).receive, received)
        assert sending.result(TIMEOUT_S) == receiving.result(TIMEOUT_S) > 8 << 10
    assert all(torch.equal(sent[name], received[name]) for name in sent)


def test_weights_of_another_model_are_refused_by_both(store: TCPStore) -> None:
    other = weights(False) | {"more": torch.zeros(1)}
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(end_of(store).send, weights(True)),
            pool.submit(end_of(store).receive, other),
        ]
        for side in sides:
            with pytest.raises(TransferError, match="weights differ"):
                side.result(TIMEOUT_S)
    assert not other["dense"].any()


def test_nobody_waits_longer_than_the_operation_lasts(store: TCPStore) -> None:
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(end_of(store, over).send, weights(True))
        over.set()
        with pytest.raises(GivenUp):
            sending.result(TIMEOUT_S)
