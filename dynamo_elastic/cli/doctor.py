"""`dynamo-elastic doctor`: what this host can do for each tier, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynamo_elastic.agent.base import Tier
from dynamo_elastic.agent.boot import slot_gpus
from dynamo_elastic.cli.host_facts import HostFacts, read_facts
from dynamo_elastic.cli.images import print_json
from dynamo_elastic.config import DeploymentConfig, load_config
from dynamo_elastic.errors import ConfigError, ElasticError
from dynamo_elastic.snapshot.base import PIDS_PER_SLOT, first_pid

_GIB = 1 << 30
_IMAGE_BYTES = 2 * _GIB
"""What is reckoned for one image of an engine with a GPU, or one that is parked."""
_IO_URING_OFF = 2
_SLOTS = 4
"""Reckoned with where no deployment is named."""

_IMAGES = (Tier.IMAGE,)
_SNAPSHOTS = (Tier.PARKED, Tier.IMAGE)
_ALL = tuple(Tier)


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. A MISSING one stands in the way of `tiers`; () if it only stops `serve`."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    tiers: tuple[Tier, ...] = ()


def doctor(
    file: Annotated[
        Path | None,
        typer.Option(
            "-f", "--file", envvar="DYN_ELASTIC_CONFIG", help="Deployment YAML; default: none."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this host can do for each tier, with a remedy for what it can't. Exit code 1 if
    something is missing that the deployment asks for."""
    config = load_config(file) if file is not None else None
    found = findings(read_facts(config), config)
    broken = in_the_way(found, config)
    if as_json:
        print_json({"tiers": tiers(found), "findings": [asdict(f) for f in found]})
    else:
        _print(found)
    if broken:
        raise ElasticError(f"missing: {', '.join(f.check for f in broken)}")


def findings(facts: HostFacts, config: DeploymentConfig | None) -> list[Finding]:
    """Every line, from what was looked at. Pure."""
    return [
        *_host_findings(facts, config),
        *_gpu_findings(facts, config),
        *_serve_findings(facts),
    ]


def tiers(found: Sequence[Finding]) -> dict[str, str]:
    """Tier -> 'ok', or the checks that are missing for it."""
    return {
        tier.value: ", ".join(f.check for f in found if _missing(f) and tier in f.tiers) or "ok"
        for tier in Tier
    }


def in_the_way(found: Sequence[Finding], config: DeploymentConfig | None) -> list[Finding]:
    """What is missing of all that the deployment asks for; without one, all tiers are asked for."""
    wanted = set(Tier)
    if config is not None and not config.snapshot.enabled:
        wanted.discard(Tier.IMAGE)
    if config is not None and not config.snapshot.parked.enabled:
        wanted.discard(Tier.PARKED)
    return [f for f in found if _missing(f) and (not f.tiers or wanted.intersection(f.tiers))]


def _missing(finding: Finding) -> bool:
    return finding.verdict is Verdict.MISSING


def _judged(
    check: str, problem: str, found: str, tiers_: tuple[Tier, ...], remedy: str = ""
) -> Finding:
    """MISSING with the problem, which ends with its remedy after ': ' unless given; or OK."""
    if not problem:
        return Finding(check, Verdict.OK, found, tiers=tiers_)
    what, _, then = problem.rpartition(": ")
    return Finding(check, Verdict.MISSING, what or problem, remedy or then, tiers_)


def _host_findings(facts: HostFacts, config: DeploymentConfig | None) -> Iterator[Finding]:
    slots = _SLOTS if config is None else config.scale.max_ranks
    not_root = "" if facts.uid == 0 else f"uid {facts.uid}: run the agent as root"
    yield _judged("uid", not_root, "root", _IMAGES)
    yield _judged("pid namespaces", facts.no_namespace, "can be made", _IMAGES)
    yield _judged("CRIU", facts.no_criu, facts.criu, _IMAGES)
    if facts.page_server:
        yield Finding("userfaultfd", Verdict.OK, "images are filled by threads", tiers=_IMAGES)
    elif facts.criu:
        remedy = "let the agent's container call userfaultfd(2), and use a kernel that has it"
        found = "not usable: CRIU fills images by itself, several times slower"
        yield Finding("userfaultfd", Verdict.WARNING, found, remedy, _IMAGES)
    highest = first_pid(slots) + 2 * PIDS_PER_SLOT
    too_few = (
        "" if facts.pid_max > highest else f"{facts.pid_max}: sysctl kernel.pid_max={highest * 4}"
    )
    yield _judged("kernel.pid_max", too_few, str(facts.pid_max), _IMAGES)
    per_slot = _IMAGE_BYTES if facts.gpus else _IMAGE_BYTES // 4
    needed = slots * per_slot
    yield _space("image space", facts.catalog_free_bytes, needed, _where(facts), _IMAGES)
    yield _space("host memory", facts.memory_free_bytes, needed, "to park in", (Tier.PARKED,))
    if facts.io_uring_disabled == _IO_URING_OFF:
        yield Finding("io_uring", Verdict.OK, "disabled", tiers=_IMAGES)
    else:
        remedy = "sysctl kernel.io_uring_disabled=2, if engines use uvloop or libuv"
        found = "enabled: an engine that uses it can't be dumped"
        yield Finding("io_uring", Verdict.WARNING, found, remedy, _IMAGES)


def _where(facts: HostFacts) -> str:
    return f"in {facts.catalog} ({'memory' if facts.catalog_in_memory else 'disk'})"


def _space(check: str, free: int, needed: int, where: str, for_: tuple[Tier, ...]) -> Finding:
    found = f"{free / _GIB:.1f} GiB free {where}"
    if free >= needed:
        return Finding(check, Verdict.OK, found, tiers=for_)
    remedy = f"{needed / _GIB:.0f} GiB are reckoned with: make room or lower scale.max_ranks"
    return Finding(check, Verdict.WARNING, found, remedy, for_)


def _gpu_findings(facts: HostFacts, config: DeploymentConfig | None) -> Iterator[Finding]:
    if facts.no_gpu:
        yield _judged("GPU", facts.no_gpu, "", _ALL)
        return
    if not facts.gpus:
        found = "none: engines run on the CPU, and parking frees memory only"
        yield Finding("GPU", Verdict.OK, found)
        return
    names = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
    yield Finding("GPU", Verdict.OK, f"{len(facts.gpus)} x {names}")
    yield _mapping(facts, config)
    driver = facts.gpus[0].driver_version
    old = "" if facts.cuda.checkpoint else f"driver {driver} can't checkpoint: install 580 or newer"
    yield _judged("driver", old, f"{driver}, checkpoints", _SNAPSHOTS)
    off = [uuid for uuid, modes in facts.modes.items() if not modes.persistence]
    if off:
        # The agent keeps CUDA initialised, which holds the driver as well; it is slower to start.
        found = f"off on {len(off)} GPUs"
        yield Finding("persistence", Verdict.WARNING, found, "nvidia-smi -pm 1", _SNAPSHOTS)
    else:
        yield Finding("persistence", Verdict.OK, "on", tiers=_SNAPSHOTS)
    mig = [uuid for uuid, modes in facts.modes.items() if modes.mig]
    in_parts = f"on for {', '.join(mig)}: nvidia-smi -mig 0" if mig else ""
    yield _judged("MIG", in_parts, "off", _SNAPSHOTS)
    mps = "a control daemon runs: echo quit | nvidia-cuda-mps-control" if facts.mps else ""
    yield _judged("MPS", mps, "off", _SNAPSHOTS)


def _mapping(facts: HostFacts, config: DeploymentConfig | None) -> Finding:
    if config is None:
        return Finding("agent.gpus", Verdict.OK, "no deployment named")
    try:
        mapped = slot_gpus(config, facts.gpus)
    except ConfigError as exc:
        return Finding(
            "agent.gpus", Verdict.MISSING, "; ".join(exc.faults), "correct agent.gpus", _ALL
        )
    without = sorted(set(range(config.scale.max_ranks)) - set(mapped))
    found = ", ".join(f"slot {slot}: {uuid}" for slot, uuid in mapped.items())
    if without:
        remedy = f"slots {without} have none: lower scale.max_ranks, or name GPUs in agent.gpus"
        return Finding("agent.gpus", Verdict.WARNING, found, remedy)
    if len(set(mapped.values())) < len(mapped):
        return Finding("agent.gpus", Verdict.WARNING, found, "give each slot a GPU of its own")
    return Finding("agent.gpus", Verdict.OK, found)


def _serve_findings(facts: HostFacts) -> Iterator[Finding]:
    yield _judged("NIXL", facts.no_nixl, "an agent starts", _ALL)
    yield _judged("etcd", facts.no_etcd, "there", ())
    if not facts.faults:
        yield Finding("deployment", Verdict.OK, "nothing stands against it")
    for fault in facts.faults:
        what, _, remedy = fault.partition("; ")
        yield Finding(what.partition(":")[0], Verdict.MISSING, what, remedy)


_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}


def _print(found: Sequence[Finding]) -> None:
    table = Table("check", "", "found", "remedy", "for", box=None)
    for f in found:
        verdict = f"[{_STYLES[f.verdict]}]{f.verdict}[/]"
        table.add_row(f.check, verdict, f.found, f.remedy, ", ".join(f.tiers))
    console = Console(highlight=False)
    console.print(table)
    for tier, state in tiers(found).items():
        typer.echo(f"{tier}: {state if state == 'ok' else f'not possible: {state}'}")
