"""CUDA graphs rebound to another buffer of another rank, against capturing them again.

    python3 benchmarks/gpu_rebind.py            # one GPU; with two, also a joint step afterwards

50 graphs of 30 layers hold kernels of NIXL EP, kernels of the engine that write into the buffer,
and copies and fills of its memory. They are captured as rank 0, checked against rank 2, and rebound
to rank 1; each is replayed and compared with the same layers run without a graph.
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_ranks import attempt, gpu_count, run_ranks
from gpu_report import Report

from dynamo_elastic.testing.expert_buffer_group import (
    RankProcess,
    activate,
    call_all,
    connect,
)

GRAPHS, LAYERS = 50, 30
SHAPE = {
    "capacity": 4,
    "experts_per_rank": 4,
    "hidden": 2048,
    "top_k": 4,
    "max_tokens": 64,
    "timeout_ms": 4000,
}
DECOY_BYTES = (32 << 20, 2 << 20, 64 << 20)
JOINT_STEPS = 20
DEADLINE_S = 240


def body(report: Report, stack: ExitStack) -> None:
    rank = start(stack, 0, gpu_count() - 1)
    rank.call("keep")
    captured = rank.call("capture_all", graphs=GRAPHS, layers=LAYERS)
    recorded = rank.call("record")
    report.note("captured", captured)
    report.metric("nodes", recorded["nodes"])
    report.metric("record_s", recorded["record_s"])
    report.metric("buffer_bytes", rank.call("memory_bytes"))
    report.note("first_max_rel_err", rank.call("verify_all", layers=LAYERS))

    renew(rank, 2)
    rank.call("check_other")
    renew(rank, 1)
    rebound = rank.call("rebind")
    report.note("rebound", rebound)
    for name in ("rebind_s", "probe_s", "moved"):
        report.metric(name, rebound[name])
    report.metric("nodes_written", sum(rebound["written"].values()))
    report.metric("replay_max_rel_err", rank.call("verify_all", layers=LAYERS))

    if gpu_count() > 1:
        attempt(report, "joint", lambda: joint(report, stack, rank))
    renew(rank, 0)
    report.metric("rebind_again_s", rank.call("rebind")["rebind_s"])
    report.metric("replay_again_max_rel_err", rank.call("verify_all", layers=LAYERS))
    rank.call("forget")
    report.metric(
        "recapture_s", rank.call("capture_all", graphs=GRAPHS, layers=LAYERS)["capture_s"]
    )


def start(stack: ExitStack, number: int, gpu: int) -> RankProcess:
    """A rank with an open buffer."""
    rank = RankProcess(number, gpu, program=[str(Path(__file__).resolve()), "--rank"])
    stack.callback(rank.close)
    rank.call("open", rank=number, **SHAPE)
    return rank


def renew(rank: RankProcess, number: int) -> None:
    """Another buffer at other addresses, for another number."""
    others = list(range(SHAPE["capacity"]))
    rank.call("destroy", released_by=others)
    rank.call("occupy", sizes=[*DECOY_BYTES, rank.call("buffer_bytes")])
    rank.call("open", rank=number, **SHAPE)
    rank.number = number


def joint(report: Report, stack: ExitStack, rank: RankProcess) -> None:
    """Graphs that were rebound, and those of a rank that has just captured them, in one step."""
    peer = start(stack, 0, 0)
    peer.call("keep")
    peer.call("capture_all", graphs=1, layers=LAYERS)
    connect([rank], [peer])
    activate([peer, rank])
    everyone = [peer, rank]
    call_all(everyone, "route", world=[0, 1])
    seconds = call_all(everyone, "replay_graph", index=0, count=JOINT_STEPS)
    checks = call_all(everyone, "check", world=[0, 1])
    masked = call_all(everyone, "masked")
    report.note("joint", {"seconds": seconds, "checks": checks, "masked": masked})
    report.metric("joint_step_ms", max(seconds) * 1e3)
    report.metric("joint_max_rel_err", max(check["error"] for check in checks))
    report.metric("joint_bad_tokens", sum(check["bad_tokens"] for check in checks))
    for one, other in ((peer, 1), (rank, 0)):
        one.call("deactivate", ranks=[other])
    for one, other in ((peer, 1), (rank, 0)):
        one.call("disconnect", ranks=[other])


def serve_rank(descriptor: int) -> None:
    """The process of one rank."""
    import torch
    from cuda.bindings import driver

    from dynamo_elastic.comm.nixl_ep import NixlExpertBuffer
    from dynamo_elastic.testing.expert_buffer_rank import serve
    from dynamo_elastic.testing.graphs_rank import GraphsRank

    class Rank(GraphsRank):
        """Its layers hold every kind of node that can refer to a buffer."""

        def layer(self, experts: bool = True) -> None:
            arrived = self.buffer.dispatch(self._x, self._ids)
            results = arrived.tokens * self._scales
            staging = self.buffer.staging(arrived)
            staging.copy_(results)  # a kernel of the engine that writes into the buffer
            stream = torch.cuda.current_stream().cuda_stream
            row_bytes = staging.shape[-1] * staging.element_size()
            driver.cuMemsetD8Async(staging.data_ptr(), 0, row_bytes, stream)
            staging[0, 0].copy_(results[0, 0])  # without it, the first token would be zero
            self.buffer.combine(
                results, self._ids, self._weights, arrived, out=self._out, staged=True
            )

        def buffer_bytes(self) -> int:
            return self._last_bytes

        def open(self, rank: int, **shape: int) -> float:
            elapsed_s = super().open(rank, **shape)
            self._last_bytes = self.buffer.memory.size_bytes
            return elapsed_s

    torch.cuda.init()  # type: ignore[no-untyped-call]
    serve(Rank(NixlExpertBuffer), socket.socket(fileno=descriptor))


def main() -> Any:
    if sys.argv[1:2] == ["--rank"]:
        return serve_rank(int(sys.argv[2]))
    return run_ranks("gpu_rebind", body, deadline_s=DEADLINE_S)


if __name__ == "__main__":
    main()
