"""A scale-up as discrete events: the coordinator's steps through one etcd, engines that work in
parallel, weights over links that are shared.

Everything it knows is in Control, Engine and Fabric, which parameters.py makes of measured results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from des import Server, Simulation

GIGA = 1e9
INSTALLS = 3
"""Of a round of expert moves: what is spared, what has been proven, the result."""


@dataclass(frozen=True, slots=True)
class Control:
    """The control plane. All seconds."""

    step_s: float
    """Of one step, whoever takes part."""
    worker_s: float
    """Of etcd and coordinator, for one participant of one step."""
    topology_line_s: float
    """Of etcd, for what one participant reads of one rank of a topology."""
    endpoint_s: float
    """The same, for one endpoint: each is a key."""
    commit_s: float
    commit_worker_s: float


NO_CONTROL = Control(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Engine:
    """What engines do by themselves. Seconds, but for bytes and rates."""

    restore_s: float
    open_s: float
    connect_s: float
    connect_peer_s: float
    """More for each peer but the first."""
    check_s: float
    switch_s: float
    canary_s: float
    serve_s: float
    rebalance_s: float
    dense_bytes: float
    digest_gbps: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links. A rank sends at most one copy at a time and receives at most one."""

    node_gpus: int
    node_gbps: float
    """Between GPUs of a node."""
    network_gbps: float
    """Of one GPU's network link."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Seconds of each phase, and what etcd had to do."""

    phases_s: dict[str, float]
    etcd_busy_s: float
    etcd_requests: int
    etcd_lines: int
    """Lines of topologies and endpoints that it sent."""

    @property
    def total_s(self) -> float:
        return sum(self.phases_s.values())

    @property
    def dominant(self) -> str:
        return max(self.phases_s, key=lambda p: self.phases_s[p])


class _Steps:
    """Runs steps one after another, and counts."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.busy_s = 0.0
        self.requests = 0
        self.lines = 0

    def run(
        self, ranks: int, work_s: Callable[[int], float], *, reads: int = 0, line_s: float = 0.0
    ) -> float:
        """A step of `ranks` participants: command, read `reads` lines, work, answer."""
        simulation, half_s = Simulation(), self._control.worker_s / 2
        etcd = Server(simulation)

        def commanded(rank: int) -> None:
            etcd.serve(line_s * reads, partial(has_read, rank))

        def has_read(rank: int) -> None:
            simulation.after(work_s(rank), answers)

        def answers() -> None:
            etcd.serve(half_s, lambda: None)

        for rank in range(ranks):
            etcd.serve(half_s, partial(commanded, rank))
        self.requests += ranks * (3 if reads else 2)
        self.lines += ranks * reads
        took_s = simulation.run() + self._control.step_s
        self.busy_s += etcd.busy_s
        return took_s


def scale_up(
    before: int,
    after: int,
    control: Control,
    engine: Engine,
    fabric: Fabric,
    *,
    tree: bool = False,
) -> Operation:
    """From `before` ranks to `after`, joiners next to each other on nodes of their own. Without
    `tree` weights come from the retained ranks alone, as they do today."""
    steps, joiners = _Steps(control), after - before

    def same(seconds: float) -> Callable[[int], float]:
        return lambda rank: seconds

    def connect_s(rank: int) -> float:
        peers = joiners if rank < before else after - 1
        return engine.connect_s + engine.connect_peer_s * (peers - 1)

    def told(rank_s: Callable[[int], float]) -> float:
        """A step of all whose commands bring a new topology."""
        return steps.run(after, rank_s, reads=after, line_s=control.topology_line_s)

    digest_s = engine.dense_bytes / GIGA / engine.digest_gbps if engine.dense_bytes else 0.0
    copies_s = fan_out_s(before, joiners, engine.dense_bytes, fabric, tree=tree)
    phases_s = {
        "plan": steps.run(before, same(0.0)),
        "restore": steps.run(joiners, same(engine.restore_s)),
        "connect": told(same(engine.open_s))
        + steps.run(after, connect_s, reads=after, line_s=control.endpoint_s),
        "stream": steps.run(before, same(copies_s)),
        "check": steps.run(joiners + 1, same(engine.check_s + digest_s)),
        "commit": control.commit_s
        + control.commit_worker_s * after
        + steps.run(after, same(engine.switch_s)),
        "canary": steps.run(joiners + 1, same(engine.canary_s)),
        "serve": steps.run(joiners, same(engine.serve_s)),
        "rebalance": engine.rebalance_s
        + sum(told(same(0.0)) for _ in range(INSTALLS))
        + 2 * steps.run(after, same(0.0)),
    }
    return Operation(phases_s, steps.busy_s, steps.requests, steps.lines)


def fan_out_s(
    sources: int, joiners: int, size_bytes: float, fabric: Fabric, *, tree: bool
) -> float:
    """Until every joiner has its copy. With `tree` who has one is a source for the next, and a node
    gets one over the network; without, each joiner reads from a retained rank over the network."""
    if not size_bytes:
        return 0.0
    network_s = size_bytes / GIGA / fabric.network_gbps
    node_s = size_bytes / GIGA / fabric.node_gbps
    if sources + joiners <= fabric.node_gpus:
        return _spread([0.0] * sources, joiners, node_s, tree=tree)[-1]
    if not tree:
        return _spread([0.0] * sources, joiners, network_s, tree=False)[-1]
    nodes = -(-joiners // fabric.node_gpus)
    arrived_s = _spread([0.0] * sources, nodes, network_s, tree=True)
    inside = min(joiners, fabric.node_gpus) - 1
    if not inside:
        return max(arrived_s)
    return max(_spread([at_s], inside, node_s, tree=True)[-1] for at_s in arrived_s)


def _spread(holders_s: Sequence[float], takers: int, copy_s: float, *, tree: bool) -> list[float]:
    """When each of `takers` has its copy; `holders_s` is when each of those who have one is free.
    Sources send one copy after another; with `tree` a taker then sends too."""
    simulation, arrived_s = Simulation(), list[float]()
    left = takers

    def send() -> None:
        nonlocal left
        if left:
            left -= 1
            simulation.after(copy_s, sent)

    def sent() -> None:
        arrived_s.append(simulation.now_s)
        send()
        if tree:
            send()

    for free_s in holders_s:
        simulation.after(free_s, send)
    simulation.run()
    return arrived_s
