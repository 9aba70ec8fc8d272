"""The adapter on NIXL EP over made-up bindings: what no GPU is needed for."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from dynamo_elastic.comm.expert_rules import BufferShape
from dynamo_elastic.errors import BufferMisused, ConfigError, PeerUnreachable, ResourceMissing
from dynamo_elastic.types import Rank

SHAPE = BufferShape(capacity=4, experts_per_rank=2, hidden=2048, top_k=2, max_tokens=8)
ZERO, ONE, TWO = Rank(0), Rank(1), Rank(2)


class Bindings:
    """Stands in for nixl_ep.Buffer, and remembers its calls. `marks` is the device's mask."""

    marks = (0, -1, -1, -1)
    failure: Exception | None = None
    hold: threading.Event | None = None
    unknown: list[int] | None = None
    calls: list[tuple[Any, ...]]
    last: Bindings

    def __init__(self, rank: int, explicitly_destroy: bool, timeout_ms: int) -> None:
        assert explicitly_destroy
        self.calls = [("init", rank, timeout_ms)]
        self.runtime = self
        type(self).last = self

    @staticmethod
    def get_low_latency_buffer_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return tokens * hidden * ranks * experts

    def update_memory_buffers(self, ranks: int, experts_per_rank: int, size_bytes: int) -> None:
        self.calls.append(("memory", ranks, experts_per_rank, size_bytes))

    def get_local_buffer_tensor(self, dtype: torch.dtype, use_rdma_buffer: bool) -> torch.Tensor:
        return torch.zeros(16, dtype=dtype)

    def get_local_metadata(self) -> bytes:
        return b"blob"

    def connect_ranks(self, ranks: list[int], blobs: list[bytes], activate: bool) -> None:
        self.calls.append(("connect", ranks, blobs, activate))
        if self.hold is not None:
            self.hold.wait()
        if self.failure is not None:
            raise self.failure

    def disconnect_ranks(self, ranks: list[int]) -> None:
        if ranks == self.unknown:
            raise RuntimeError("Assertion failed: _is_rank_connected(removed_rank)")
        self.calls.append(("disconnect", ranks))

    def update_mask_buffer(self, rank: int, mask: bool) -> None:
        self.calls.append(("mask", rank, mask))

    def query_mask_buffer(self, status: torch.Tensor) -> None:
        status.copy_(torch.tensor(self.marks, dtype=torch.int32))

    def low_latency_dispatch(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        self.calls.append(("dispatch", args[2:], options))
        return torch.zeros(1), torch.zeros(1), "handle", None, None

    def low_latency_combine(self, *args: Any, **options: Any) -> None:
        self.calls.append(("combine", args[3], options["zero_copy"]))

    def destroy(self) -> None:
        self.calls.append(("destroy",))


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's module on made-up bindings, and on the CPU."""
    package = ModuleType("nixl_ep_cu13")
    bindings = type("Fresh", (Bindings,), {})
    package.Buffer = bindings  # type: ignore[attr-defined]
    package.topk_idx_t = torch.int32  # type: ignore[attr-defined]
    zeros = torch.zeros

    @contextmanager
    def fresh_blocks(heap: object) -> Iterator[None]:
        yield
        bindings.last.calls.append(("end of fresh blocks",))  # type: ignore[attr-defined]

    monkeypatch.setitem(sys.modules, "nixl_ep_cu13", package)
    monkeypatch.delitem(sys.modules, "dynamo_elastic.comm.nixl_ep", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    monkeypatch.setenv("UCX_CUDA_IPC_CACHE", "n")
    module = importlib.import_module("dynamo_elastic.comm.nixl_ep")
    monkeypatch.setattr(module, "fresh_blocks", fresh_blocks)
    monkeypatch.setattr(module, "DriverHeap", lambda device: device)
    yield module
    sys.modules.pop("dynamo_elastic.comm.nixl_ep", None)


@pytest.fixture
def buffer(adapter: Any) -> Any:
    return adapter.NixlExpertBuffer(SHAPE, ZERO)


def calls(adapter: Any) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = adapter.nixl_ep.Buffer.last.calls
    return made


def test_it_is_built_for_its_capacity(adapter: Any, buffer: Any) -> None:
    memory = ("memory", 4, 2, 8 * 2048 * 4 * 8)
    assert calls(adapter)[:3] == [("init", 0, 500), memory, ("end of fresh blocks",)]
    assert buffer.metadata() == b"blob"
    assert buffer.memory.size_bytes == 8 * 2048 * 4 * 8
    assert buffer.masked() == frozenset()


@pytest.mark.parametrize("setting", [None, "y", "try"])
def test_it_refuses_where_ucx_caches_ipc_mappings(
    adapter: Any, monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    if setting is None:
        monkeypatch.delenv("UCX_CUDA_IPC_CACHE")
    else:
        monkeypatch.setenv("UCX_CUDA_IPC_CACHE", setting)
    with pytest.raises(ResourceMissing, match="UCX_CUDA_IPC_CACHE=n"):
        adapter.NixlExpertBuffer(SHAPE, ZERO)
    assert not hasattr(adapter.nixl_ep.Buffer, "last")


def test_shapes_are_checked_before_anything_is_built(adapter: Any) -> None:
    wrong = BufferShape(capacity=12, experts_per_rank=2, hidden=1000, top_k=2, max_tokens=3)
    with pytest.raises(ConfigError) as caught:
        adapter.NixlExpertBuffer(wrong, Rank(12))
    assert [fault.split()[0] for fault in caught.value.faults] == ["capacity", "rank", "hidden"]
    assert not hasattr(adapter.nixl_ep.Buffer, "last")


def test_connect_is_masked_and_by_metadata(adapter: Any, buffer: Any) -> None:
    buffer.connect({ONE: b"one", TWO: b"two"}, timeout_s=5)
    assert calls(adapter)[-1] == ("connect", [1, 2], [b"one", b"two"], False)
    buffer.activate([ONE])
    assert calls(adapter)[-1] == ("mask", 1, False)
    assert {r: s.value for r, s in buffer.states.items()} == {
        1: "active",
        2: "connected",
        3: "absent",
    }


def test_an_error_of_the_transport_is_not_reachable(adapter: Any, buffer: Any) -> None:
    adapter.nixl_ep.Buffer.failure = RuntimeError("NIXL_ERR_BACKEND")
    with pytest.raises(PeerUnreachable, match="NIXL_ERR_BACKEND") as caught:
        buffer.connect({ONE: b"one"}, timeout_s=5)
    assert caught.value.ranks == {1}
    assert buffer.states[ONE] == "broken"
    adapter.nixl_ep.Buffer.failure = None
    # Nothing of it was connected, and then NIXL EP refuses to disconnect it.
    adapter.nixl_ep.Buffer.unknown = [1]
    assert buffer.can_disconnect
    buffer.disconnect([ONE])
    # NIXL may still know the name of whoever is rank 1, and would refuse another one.
    assert not buffer.can_connect
    with pytest.raises(BufferMisused, match="a connect failed"):
        buffer.connect({ONE: b"another"}, timeout_s=5)
    assert buffer.states[ONE] == "absent"


def test_a_connect_that_never_returns_is_left_behind(adapter: Any, buffer: Any) -> None:
    buffer.connect({ONE: b"one"}, timeout_s=5)
    buffer.activate([ONE])
    hold = adapter.nixl_ep.Buffer.hold = threading.Event()
    try:
        with pytest.raises(PeerUnreachable, match=r"no answer in 0\.05 s"):
            buffer.connect({TWO: b"two"}, timeout_s=0.05)
        ids = torch.zeros(8, 2, dtype=torch.int32)
        x = torch.zeros(8, 2048, dtype=torch.bfloat16)
        arrived = buffer.dispatch(x, ids)
        buffer.combine(x, ids, torch.zeros(8, 2), arrived, out=x)
        buffer.deactivate([ONE])
        for act in (buffer.disconnect, lambda ranks: buffer.connect({TWO: b"2"}, timeout_s=1)):
            with pytest.raises(BufferMisused, match="never returned"):
                act([ONE])
        buffer.destroy(released_by=[ONE, TWO])
        assert ("destroy",) not in calls(adapter)
    finally:
        hold.set()


def test_the_mask_makes_a_peer_timed_out_for_good(adapter: Any, buffer: Any) -> None:
    buffer.connect({ONE: b"one", TWO: b"two"}, timeout_s=5)
    buffer.activate([ONE, TWO])
    adapter.nixl_ep.Buffer.marks = (0, 1, 0, -1)
    assert buffer.masked() == {ONE}
    assert buffer.masked() == {ONE}
    with pytest.raises(BufferMisused, match="fresh buffer"):
        buffer.activate([ONE])
    buffer.disconnect([ONE])
    with pytest.raises(BufferMisused, match="same buffer"):
        buffer.connect({ONE: b"one"}, timeout_s=5)
    buffer.connect({ONE: b"fresh"}, timeout_s=5)


def test_every_dispatch_names_all_experts(adapter: Any, buffer: Any) -> None:
    ids = torch.zeros(4, 2, dtype=torch.int32)
    x = torch.zeros(4, 2048, dtype=torch.bfloat16)
    arrived = buffer.dispatch(x, ids)
    assert calls(adapter)[-1] == ("dispatch", (8, 8), {"use_fp8": False})
    buffer.combine(x, ids, torch.zeros(4, 2), arrived, out=x, staged=True)
    assert calls(adapter)[-1] == ("combine", "handle", True)


@pytest.mark.parametrize(
    ("x", "ids", "wanted"),
    [
        (
            torch.zeros(9, 2048, dtype=torch.bfloat16),
            torch.zeros(9, 2, dtype=torch.int32),
            "at most",
        ),
        (torch.zeros(8, 2048), torch.zeros(8, 2, dtype=torch.int32), "bfloat16"),
        (torch.zeros(8, 1024, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.int32), "2048"),
        (torch.zeros(8, 2048, dtype=torch.bfloat16), torch.zeros(8, 2), "int32"),
        (
            torch.zeros(8, 2048, dtype=torch.bfloat16),
            torch.zeros(8, 3, dtype=torch.int32),
            "[8, 2]",
        ),
    ],
)
def test_tokens_that_do_not_fit(
    adapter: Any, buffer: Any, x: torch.Tensor, ids: torch.Tensor, wanted: str
) -> None:
    with pytest.raises(BufferMisused) as caught:
        buffer.dispatch(x, ids)
    assert wanted in caught.value.remedy
    assert buffer.parity == 0
    assert calls(adapter)[-1] == ("end of fresh blocks",)
