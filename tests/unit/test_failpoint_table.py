"""The failpoint table is true of the code, and no step of any process is without a failpoint."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import dynamo_elastic
from dynamo_elastic.comm.base import ExpertBuffer, ExpertGroup
from dynamo_elastic.engine.rpc import CALLS
from dynamo_elastic.failpoint_table import FAILPOINTS, HOLDS, Actor, table
from dynamo_elastic.failpoints import FailpointError, error_at
from dynamo_elastic.kubernetes.decide import Action
from dynamo_elastic.phases import PHASES, Kind, Phase, Step
from dynamo_elastic.snapshot.base import RESTORE_MOVES, TAKE_MOVES, CudaOperation
from dynamo_elastic.testing import simulation, simulation_faults
from dynamo_elastic.testing.simulation import COORDINATOR, Schedule, play
from dynamo_elastic.testing.simulation_parts import DROPPED

PACKAGE = Path(dynamo_elastic.__file__).parent
FOLDERS = (PACKAGE, PACKAGE.parent / "snapshot", PACKAGE.parent / "comm")
NAMES = frozenset(f.name for f in FAILPOINTS)


@cache
def trees() -> dict[Path, ast.Module]:
    files = {f.resolve() for folder in FOLDERS for f in folder.rglob("*.py")}
    return {f: ast.parse(f.read_text()) for f in sorted(files)}


def pattern(argument: ast.expr) -> str:
    """What a call of failpoint() may be called with; what a name is made of stands for anything."""
    if isinstance(argument, ast.Constant):
        return re.escape(str(argument.value))
    assert isinstance(argument, ast.JoinedStr), ast.dump(argument)
    parts = argument.values
    return "".join(
        re.escape(str(p.value)) if isinstance(p, ast.Constant) else r"\w+" for p in parts
    )


def calls(tree: ast.AST) -> Iterator[str]:
    """Patterns of all failpoints that stand in `tree`."""
    for node in ast.walk(tree):
        name = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and isinstance(name, ast.Name) and name.id == "failpoint":
            yield pattern(node.args[0])


PATTERNS = frozenset(p for tree in trees().values() for p in calls(tree))


def test_the_table_lists_every_failpoint_of_the_code_once() -> None:
    assert len(NAMES) == len(FAILPOINTS)
    unlisted = [p for p in PATTERNS if not any(re.fullmatch(p, name) for name in NAMES)]
    assert unlisted == []


def test_every_failpoint_of_the_table_stands_in_the_code() -> None:
    # A pattern stands for what its tables have, and not for whatever has such a name.
    made = steps_of_all_processes() | acts_on_pods()
    gone = [name for name in NAMES if re.escape(name) not in PATTERNS and name not in made]
    assert gone == []
    assert [n for n in made if not any(re.fullmatch(p, n) for p in PATTERNS)] == []


def test_what_must_hold_is_said_of_every_stage_and_of_no_other() -> None:
    assert {(f.actor, f.stage) for f in FAILPOINTS} == set(HOLDS)


def test_an_injected_error_is_one_that_its_place_knows() -> None:
    assert [f.name for f in FAILPOINTS if isinstance(error_at(f.name), FailpointError)] == []


def steps_of_all_processes() -> set[str]:
    """One name for every step of every process, from the tables and seams that the code obeys."""
    phases = {p.phase for specs in PHASES.values() for p in specs}
    steps = {s for specs in PHASES.values() for p in specs for s, _ in p.steps}
    # Those that the phase table does not name: of an abort, a withdrawal and expert moves.
    steps |= {Step.ABORT, Step.WITHDRAW, Step.INSTALL}
    assert steps == set(Step)
    # A track begins with a phase in which nothing happens, and its last two are its ends.
    made = {f"take.{phase}" for phase, to in TAKE_MOVES.items() if to}
    made |= {f"restore.{phase}" for phase, to in RESTORE_MOVES.items() if to}
    return {
        *(f"scale.{when}_{phase}" for phase in phases for when in ("before", "after")),
        *(f"scale.{step}.commanded" for step in steps),
        *(f"worker.{step}.{at}" for step in steps for at in ("begin", "end")),
        *(f"engine.{call}" for call in CALLS),
        *(f"cuda.{operation}" for operation in CudaOperation),
        *(made - {"take.start", "restore.start"}),
    }


def acts_on_pods() -> set[str]:
    acts = [act.__name__.lower() for act in get_args(Action)]
    return {f"kubernetes.{when}_{act}" for act in acts for when in ("before", "after")}


def test_no_phase_step_or_call_of_any_process_is_without_a_failpoint() -> None:
    assert steps_of_all_processes() - NAMES == set()


CHANGING = {
    "snapshot/catalog.py": ("publish", "remove", "remove_partials"),
    "snapshot/archive.py": ("import_image", "export_image"),
    "snapshot/take.py": ("take_snapshot",),
    "snapshot/park.py": ("park", "unpark"),
    "snapshot/freeze.py": ("freeze", "thaw"),
    "comm/host_group.py": ("connect",),
    "comm/weights.py": ("push",),
    "comm/graph_rebind.py": ("rebind",),
    "comm/peer_push.py": ("add_remote",),
    "comm/nixl_ep.py": tuple(
        name
        for name, member in vars(ExpertBuffer).items()
        # Steps run these two a thousand times a second; engine.before_first_step and the phases
        # around stand for them, and masked() and staging() only look.
        if callable(member)
        and not name.startswith("_")
        and name not in ("dispatch", "combine", "masked", "staging", "metadata")
    ),
    "dynamo_elastic/memory/vmm.py": ("populate", "discard"),
    "dynamo_elastic/engine/reference/gpu_graphs.py": ("use",),
    "dynamo_elastic/engine/reference/transfers.py": ("add",),
    "dynamo_elastic/engine/reference/life.py": ("live",),
    "dynamo_elastic/engine/reference/loop.py": ("_step", "_switch"),
    "dynamo_elastic/engine/reference/epochs.py": ("open", "connect", "push_dense", "push_experts"),
    "dynamo_elastic/agent/start.py": ("start",),
    "dynamo_elastic/agent/parking.py": ("park_engine", "unpark_engine"),
    "dynamo_elastic/agent/slots.py": ("stop", "evict", "end_all"),
    "dynamo_elastic/agent/reconcile.py": ("reconcile",),
    "dynamo_elastic/coordinator/scale.py": ("scale", "recover", "run", "roll_forward", "abort"),
    "dynamo_elastic/coordinator/step_runner.py": ("_move_experts", "_switch"),
    "dynamo_elastic/coordinator/commands.py": ("run",),
    "dynamo_elastic/coordinator/main_loop.py": ("lead", "_answer"),
    "dynamo_elastic/worker/participant.py": (
        *("run", "decided", "follow", "refresh", "resume", "settle", "suspend"),
        *("keep_registered", "expel_the_gone"),
    ),
    "dynamo_elastic/kubernetes/controller.py": ("_apply",),
}
"""By module: functions that change something outside of their own process, or that it lives by."""


@pytest.mark.parametrize("path", CHANGING)
def test_no_function_that_changes_something_is_without_a_failpoint(path: str) -> None:
    functions = {
        node.name: node
        for node in ast.walk(trees()[PACKAGE.parent / path])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    bare = [name for name in CHANGING[path] if not reaches(name, functions, set())]
    assert bare == []


def reaches(name: str, functions: Mapping[str, ast.AST], seen: set[str]) -> bool:
    """True if that function, or one of its module that it calls, has a failpoint."""
    if name in seen or name not in functions:
        return False
    seen.add(name)
    body = functions[name]
    called = {
        getattr(n.func, "attr", getattr(n.func, "id", ""))
        for n in ast.walk(body)
        if isinstance(n, ast.Call)
    }
    return any(calls(body)) or any(reaches(c, functions, seen) for c in called)


def test_the_seams_of_the_gpu_path_are_those_that_were_looked_at() -> None:
    """A call that is new in a seam needs a look at whether it needs a failpoint."""
    assert {"connect", "activate", "deactivate", "disconnect", "destroy"} <= set(
        CHANGING["comm/nixl_ep.py"]
    )
    group = {n for n, m in vars(ExpertGroup).items() if callable(m) and not n.startswith("_")}
    assert group == {"connect", "arrived", "control", "exchange", "close"}


SCHEDULES = (
    Schedule(1, (4, 2, 3), ()),
    Schedule(2, (4,), (("slot3", "worker.check.begin", "error", 0),)),
    Schedule(3, (4,), ((COORDINATOR, "scale.before_stream", "crash", 0),)),
    Schedule(4, (4,), (("slot1", "engine.decide", "stuck", 1),)),
    Schedule(5, (9,), ()),
    Schedule(6, (4,), (("slot1", DROPPED, "error", 0),)),
)


def test_operations_really_come_by_the_failpoints_of_coordinator_and_shells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: set[str] = set()
    hurt = simulation_faults.meet

    def meet(name: str) -> None:
        met.add(name)
        hurt(name)

    monkeypatch.setattr(simulation, "meet", meet)
    for schedule in SCHEDULES:
        assert play(schedule).violations == ()
    wanted = {f.name for f in FAILPOINTS if f.actor in (Actor.COORDINATOR, Actor.SHELL)}
    assert wanted - met == set()


def test_the_documentation_has_this_table() -> None:
    text = (PACKAGE.parent / "docs/reliability.md").read_text()
    assert table() in text, "run `make docs`"


def test_each_kind_and_its_phases_are_known() -> None:
    assert set(PHASES) == set(Kind)
    assert {Phase.DONE, Phase.ABORTING, Phase.ABORTED}.isdisjoint(
        {p.phase for specs in PHASES.values() for p in specs}
    )
