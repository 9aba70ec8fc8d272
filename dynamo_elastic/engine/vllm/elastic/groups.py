"""Groups of ranks over gloo alone: bootstrapped on the operation's own store, with deadlines.

vLLM makes, for each of its four groups, three stores, an NCCL communicator, its warm-up and two
process groups, and waits for a peer that never comes for as long as the store does. Small host
tensors are all that these groups carry once experts go over NIXL EP and weights over links.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllreduceOptions, ProcessGroupGloo, ReduceOp

_BOOT_TIMEOUT = timedelta(minutes=30)
"""Once a group is connected: ranks that boot wait there for each other's compilers."""


def open_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A client of our own of the store at that address. vLLM shares one client in a process, and
    whoever waits in it keeps everybody else out. Raises RuntimeError if nobody listens there."""
    return TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect_gloo(store: Store, name: str, rank: int, size: int, timeout_s: float) -> ProcessGroup:
    """A gloo group that works for host tensors, and for those of a GPU by way of the host. All
    ranks must call it: meet first (see `meeting`), for this can't be given up before `timeout_s`.
    Raises RuntimeError."""
    own = PrefixStore(f"dynamo_elastic/gloo/{name}", store)
    group = ProcessGroup(own, rank, size)
    backend = ProcessGroupGloo(own, rank, size, timeout=timedelta(seconds=timeout_s))
    backend._set_sequence_number_for_group()
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    backend._set_default_timeout(_BOOT_TIMEOUT)
    return group


def expect_steps(group: ProcessGroup, timeout: timedelta) -> None:
    """The ranks of `group`, of connect_gloo(), serve from now on: an exchange to which one does not
    come within `timeout` raises RuntimeError on all others. Idempotent."""
    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


class Numbers:
    """A process group that can be asked for its numbers alone."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def shutdown(self) -> None:
        """There is nothing to end."""


def close_gloo(group: ProcessGroup | None) -> None:
    """Nothing is exchanged in this group any more. Its sockets close with its last reference: only
    then do peers that wait for us see that we are gone. Idempotent."""
    if group is not None:
        with suppress(RuntimeError):
            group.shutdown()


def close_beside(held: list[ProcessGroup | None]) -> None:
    """As close_gloo(), of all in `held`, which has their last references and is empty after that.
    They go in a thread of their own: gloo waits there for what a peer that stands still owes."""

    def close() -> None:
        while held:
            close_gloo(held.pop())

    threading.Thread(target=close, daemon=True).start()


def reduce(group: ProcessGroup, values: Sequence[int], how: Any, timeout_s: float) -> list[int]:
    """`values` of all ranks, reduced by the ReduceOp `how`. Raises RuntimeError when a peer is gone
    or does not come in time; the group is not to be used after that."""
    # As vLLM's joiners send them: gloo ends the process of whoever expects another size.
    tensor = torch.tensor(list(values), dtype=torch.int32)
    options = AllreduceOptions()
    options.reduceOp = how
    options.timeout = timedelta(seconds=timeout_s)
    group.allreduce([tensor], options).wait()
    reduced: list[int] = tensor.tolist()
    return reduced


class Verdict:
    """The moment after which a scale operation only goes forward."""

    def __init__(self, values: list[int], reason: str) -> None:
        self.values = values
        self.reason = reason
        """Why not; empty for yes."""

    @property
    def commits(self) -> bool:
        return not self.reason


def agree(
    old: ProcessGroup,
    new: ProcessGroup,
    values: Sequence[int],
    *,
    new_timeout_s: float,
    old_timeout_s: float,
) -> Verdict:
    """Exchange `values` (the maximum counts) on the new group, then vote on the old one whether
    that went well everywhere: the ranks that serve decide alike, and without those that join. A
    joiner that died or stopped makes it no, after `new_timeout_s` at the latest, and `old` is
    as good as before. Raises RuntimeError if the old group itself is broken."""
    # Its time begins when all who serve are here: a busy host makes them late, and no joiner dead.
    reduce(old, [1], ReduceOp.MIN, old_timeout_s)
    reason, reduced = "", list(values)
    try:
        reduced = reduce(new, values, ReduceOp.MAX, new_timeout_s)
    except RuntimeError as exc:
        reason = f"the new group failed its first exchange ({str(exc).splitlines()[0][:120]})"
    everybody = reduce(old, [0 if reason else 1], ReduceOp.MIN, old_timeout_s)[0]
    if not everybody and not reason:
        reason = "the new group failed its first exchange on another rank"
    return Verdict(reduced, reason)
