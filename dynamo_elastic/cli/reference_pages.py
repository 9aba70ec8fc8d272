"""More pages of the reference, made from the code: errors, etcd keys, the HTTP API, and a diagram
of every state machine out of its table of legal moves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

from dynamo_elastic import errors
from dynamo_elastic.agent.base import SLOT_MOVES, SlotState
from dynamo_elastic.cli.exit_codes import exit_codes
from dynamo_elastic.comm.expert_rules import MOVES as PEER_MOVES
from dynamo_elastic.comm.expert_rules import PeerState
from dynamo_elastic.coordinator import records
from dynamo_elastic.coordinator.api_routes import ROUTES
from dynamo_elastic.coordinator.records import MemberState
from dynamo_elastic.dynamo.vllm_seat import SEAT_MOVES, SeatState
from dynamo_elastic.errors import ElasticError
from dynamo_elastic.phases import PHASES, Kind, Phase
from dynamo_elastic.snapshot.base import (
    CUDA_MOVES,
    RESTORE_MOVES,
    TAKE_MOVES,
    CudaState,
    RestorePhase,
    TakePhase,
)
from dynamo_elastic.worker.presence import MEMBER_MOVES

Edge = tuple[str, str, str]
"""From, to, and what is written on the arrow ('' for nothing)."""

S = TypeVar("S", bound=str)
_START = "[*]"


def pages(made: str) -> dict[Path, str]:
    """Text of each page by its path below docs/; `made` says who made it."""
    first = f"<!-- {made} -->"
    found = {
        "reference/errors.md": errors_page(),
        "reference/etcd.md": etcd_page(),
        "reference/http.md": http_page(),
        "protocol.md": protocol_page(),
    }
    return {Path(name): "\n".join([first, *lines]) + "\n" for name, lines in found.items()}


def errors_page() -> list[str]:
    """docs/reference/errors.md: the tree of errors."""
    lines = [
        "# Errors",
        "",
        "Every error that the package raises is an `ElasticError` of `dynamo_elastic.errors`. Its "
        "type says whether the act took effect and whose fault it was. Errors of other libraries "
        "are mapped where the library is imported, and never get further.",
        "",
        "| error | carries | means |",
        "|---|---|---|",
    ]
    for depth, kind in _tree(ElasticError, 0):
        indent = "&nbsp;&nbsp;" * depth * 2
        carries = ", ".join(f"`{name}`" for name in _carries(kind))
        lines.append(f"| {indent}`{kind.__name__}` | {carries} | {_meaning(kind)} |")
    lines += ["", "## Exit codes", "", "| code | error |", "|---|---|", "| 0 | none |"]
    lines += [f"| {code} | {names} |" for code, names in exit_codes().items()]
    return lines


def _tree(kind: type[ElasticError], depth: int) -> Iterator[tuple[int, type[ElasticError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child, depth + 1)


def _carries(kind: type[ElasticError]) -> list[str]:
    source = inspect.getsource(kind.__init__) if "__init__" in vars(kind) else ""
    return re.findall(r"^\s+self\.(\w+) = ", source, re.MULTILINE)


def _meaning(kind: type[ElasticError]) -> str:
    return " ".join((inspect.getdoc(kind) or "").split()).replace("|", "\\|")


def etcd_page() -> list[str]:
    """docs/reference/etcd.md: the keys, as the module that has them says."""
    layout = (inspect.getdoc(records) or "").partition("\n\n")[2]
    return [
        "# Keys in etcd",
        "",
        f"All below `{records.ROOT}/`, JSON (compressed with zlib above 32 KB), each record with "
        f"its `schema_version`: this release writes {records.SCHEMA_VERSION} and reads up to "
        f"{records.NEWEST_READ} ([upgrade.md](../upgrade.md)). *(lease)* marks keys that go when "
        "the process that wrote them does. Who needs which right: [security.md](../security.md).",
        "",
        "```text",
        *layout.strip().splitlines(),
        "```",
        "",
        "Dynamo's own keys are below `v1/`. Nobody but a coordinator that leads writes `topology`, "
        "`decided`, `operation`, `epoch` and `commands/`, and each such write is guarded by the "
        "create revision of `leader`, the fencing token.",
    ]


def http_page() -> list[str]:
    """docs/reference/http.md: routes and answers."""
    lines = [
        "# HTTP API",
        "",
        "How to use it: [http-api.md](../http-api.md). The same for machines: "
        "[`coordinator.openapi.json`](../../dynamo_elastic/schema/coordinator.openapi.json), and "
        "`GET /openapi.json`. Paths begin with the version; within `/v1` fields are added and "
        "never change their meaning.",
    ]
    for route in ROUTES:
        lines += ["", f"## {route.method.upper()} {route.path}", "", f"{route.summary}"]
        lines += ["", "Needs no token." if route.open else "Needs the token."]
        if route.body is not None:
            lines += ["", f"Body: `{route.body.__name__}`."]
        lines += ["", "| answer | body | |", "|---|---|---|"]
        for code, (body, what) in sorted(route.responses.items()):
            lines.append(f"| {code} | {f'`{body.__name__}`' if body else route.media} | {what} |")
    return lines


def protocol_page() -> list[str]:
    """docs/protocol.md: an operation's phases and every state machine."""
    lines = [
        "# The protocol",
        "",
        "What an operation goes through, and the state machines around it. The diagrams are made "
        "of the tables that the code runs by; any other move is an error (`IllegalTransition`). "
        "Why it is so: [architecture.md](architecture.md#one-scale-operation).",
    ]
    for kind in Kind:
        lines += ["", f"## Operation: {kind}", "", *diagram(_phases(kind))]
        lines += ["", "| phase | steps | what |", "|---|---|---|"]
        for spec in PHASES[kind]:
            steps = ", ".join(f"`{step}` ({who.replace('_', ' ')})" for step, who in spec.steps)
            lines.append(f"| {spec.phase.upper()} | {steps} | {spec.what} |")
    lines += [
        "",
        "Up to COMMIT's transaction a failure leads to ABORTING, and serving is untouched; from "
        "there an operation only goes forward. The steps of a phase are commands to participants, "
        "in the order of the table.",
    ]
    for name, text, edges in machines():
        lines += ["", f"## {name}", "", text, "", *diagram(edges)]
    return lines


def _phases(kind: Kind) -> list[Edge]:
    order = [spec.phase for spec in PHASES[kind]]
    edges: list[Edge] = [(_START, order[0], "")]
    edges += [(a, b, "") for a, b in zip(order, [*order[1:], Phase.DONE], strict=True)]
    if Phase.COMMIT in order:
        before = order[: order.index(Phase.COMMIT)]
        edges += [(phase, Phase.ABORTING, "") for phase in before]
        edges += [(Phase.ABORTING, Phase.ABORTED, ""), (Phase.ABORTED, _START, "")]
    return [*edges, (Phase.DONE, _START, "")]


def machines() -> list[tuple[str, str, list[Edge]]]:
    """Name, explanation and moves of every state machine of a process."""
    cuda = [(str(a), str(b), str(act)) for (a, act), b in CUDA_MOVES.items()]
    return [
        (
            "Worker shell",
            "The member record of a slot in etcd.",
            _edges(MEMBER_MOVES, MemberState.STANDBY),
        ),
        ("Slot", "What the agent does with a GPU slot.", _edges(SLOT_MOVES, SlotState.FREE)),
        (
            "Peer in an expert buffer",
            "How one rank sees another in its buffer.",
            _edges(PEER_MOVES, PeerState.ABSENT),
        ),
        (
            "CUDA in a process",
            "As the driver says it.",
            [(_START, CudaState.RUNNING, ""), *cuda],
        ),
        ("Making an image", "", _edges(TAKE_MOVES, TakePhase.START)),
        ("Restoring an image", "", _edges(RESTORE_MOVES, RestorePhase.START)),
        (
            "A replica's seat in Dynamo",
            "Registration of a vLLM replica.",
            _edges(SEAT_MOVES, SeatState.BEGINNING),
        ),
    ]


def _edges(moves: Mapping[S, AbstractSet[S]], first: S) -> list[Edge]:
    """Of a table, in its order; a state that nothing follows is final."""
    edges: list[Edge] = [(_START, first, "")]
    order = list(moves)
    for before, afters in moves.items():
        edges += [(before, after, "") for after in sorted(afters, key=order.index)]
        if not afters:
            edges.append((before, _START, ""))
    return edges


def diagram(edges: list[Edge]) -> list[str]:
    """A mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for before, after, label in edges:
        arrow = f"    {_name(before)} --> {_name(after)}"
        lines.append(f"{arrow}: {label}" if label else arrow)
    return [*lines, "```"]


def _name(state: str) -> str:
    return state if state == _START else str(state).upper().replace("-", "_").replace(" ", "_")
