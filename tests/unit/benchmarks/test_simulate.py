"""The model does what can be worked out by hand, and grows with what makes an operation longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from des import Server, Simulation
from operation_model import NO_CONTROL, Control, Engine, Fabric, fan_out_s, scale_up
from parameters import Missing, _line, checks_of, control_of

ENGINE = Engine(
    restore_s=1.0,
    open_s=0.1,
    connect_s=0.2,
    connect_peer_s=0.0,
    check_s=0.05,
    switch_s=0.01,
    canary_s=0.02,
    serve_s=0.03,
    rebalance_s=0.4,
    dense_bytes=0.0,
    digest_gbps=1.0,
)
CONTROL = Control(
    step_s=0.01,
    worker_s=0.001,
    topology_line_s=0.0,
    endpoint_s=0.0,
    commit_s=0.02,
    commit_worker_s=0.0,
)
FABRIC = Fabric(node_gpus=8, node_gbps=100.0, network_gbps=10.0)


def test_a_server_serves_in_turn() -> None:
    simulation, ends = Simulation(), list[float]()
    server = Server(simulation)
    for duration_s in (1.0, 2.0):
        server.serve(duration_s, lambda: ends.append(simulation.now_s))
    simulation.after(10.0, lambda: server.serve(1.0, lambda: ends.append(simulation.now_s)))
    assert simulation.run() == 11.0
    assert ends == [1.0, 3.0, 11.0]
    assert server.busy_s == 4.0


def test_without_a_control_plane_the_engines_are_all() -> None:
    operation = scale_up(2, 4, NO_CONTROL, ENGINE, FABRIC)
    assert operation.total_s == pytest.approx(1.0 + 0.3 + 0.05 + 0.01 + 0.02 + 0.03 + 0.4)
    assert operation.dominant == "restore"


def test_a_step_of_n_idle_ranks_takes_what_was_fitted() -> None:
    idle = replace(ENGINE, restore_s=0.0)
    for joiners in (2, 100):
        phases_s = scale_up(2, 2 + joiners, CONTROL, idle, FABRIC).phases_s
        assert phases_s["restore"] == pytest.approx(0.01 + 0.001 * joiners)


def test_reading_everybody_grows_by_the_square() -> None:
    control, idle = replace(CONTROL, endpoint_s=1e-5), replace(ENGINE, open_s=0.0, connect_s=0.0)
    times = [scale_up(2, n, control, idle, FABRIC).phases_s["connect"] for n in (500, 1000)]
    assert times[1] / times[0] == pytest.approx(4, rel=0.25)
    assert scale_up(2, 500, control, idle, FABRIC).etcd_lines == 5 * 500 * 500


@pytest.mark.parametrize(
    ("sources", "joiners", "tree", "seconds"),
    [
        (2, 2, False, 0.01),  # in one node, a copy each
        (2, 4, False, 0.02),
        (2, 6, True, 0.02),  # two copies, then four
        (2, 16, False, 0.8),  # eight copies after one another over the network
        (2, 16, True, 0.1 + 0.03),  # one to each node, then 1, 2, 4 inside
    ],
)
def test_weights_go_as_by_hand(sources: int, joiners: int, tree: bool, seconds: float) -> None:
    assert fan_out_s(sources, joiners, 1e9, FABRIC, tree=tree) == pytest.approx(seconds)


def test_a_tree_is_never_slower() -> None:
    for joiners in (1, 2, 6, 7, 30, 62, 500):
        direct, tree = (fan_out_s(2, joiners, 1e9, FABRIC, tree=t) for t in (False, True))
        assert tree <= direct + 1e-9 or joiners + 2 <= 16


def test_the_line_through_points_on_a_line_is_that_line() -> None:
    assert _line([10, 100, 1000], [0.02, 0.11, 1.01]) == pytest.approx((0.01, 0.001))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(Missing, match="python benchmarks run control_plane"):
        control_of({})
    with pytest.raises(Missing, match="cpu_scale"):
        checks_of({}, CONTROL)
