"""The result of a run: what was measured of both engines, under one set of names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from provenance import write_result
from vllm_elastic_faults import faults_metrics
from vllm_elastic_ramp import Mode
from vllm_elastic_ranks import OURS, UPSTREAM
from vllm_elastic_rounds import rounds_metrics
from vllm_elastic_scores import worst_difference
from vllm_elastic_session import Measured
from vllm_elastic_tiers import COLD
from vllm_elastic_trace import Waited, p95_between

SHARED, SHARED_ROUNDS = "vllm_elastic_shared", "vllm_elastic_shared_rounds"
Steps = Sequence[Mapping[str, Any]]


def write(root: Path) -> Path:
    """One result of both engines' steps. Raises SystemExit if there are none."""
    steps = {e: Measured(root / e).steps for e in (UPSTREAM, OURS) if (root / e).is_dir()}
    if not any(steps.values()):
        raise SystemExit(f"nothing was measured in {root}")
    metrics: dict[str, float] = {}
    for engine, of_engine in steps.items():
        prefix = "upstream_" if engine == UPSTREAM else ""
        found = metrics_of(of_engine) | ramp_metrics(of_engine, root / engine)
        metrics |= {f"{prefix}{name}": value for name, value in found.items()}
    if "upstream_up_cold_s" in metrics:
        metrics["upstream_up_s"] = metrics.pop("upstream_up_cold_s")
    metrics |= beside_upstream(steps)
    print(json.dumps(metrics, indent=1))
    return write_result(_name(steps), metrics, steps)


def _name(steps: Mapping[str, Steps]) -> str:
    if not _shares_gpus(steps):
        return "vllm_elastic"
    went_round = any(step["step"] == "round" for each in steps.values() for step in each)
    return SHARED_ROUNDS if went_round else SHARED


def _shares_gpus(steps: Mapping[str, Steps]) -> bool:
    """Whether there were fewer GPUs than ranks: then times compare one engine with the other, and
    say nothing of either alone."""
    setups = [_of(of_engine, "start").get("setup", {}) for of_engine in steps.values()]
    return any(s.get("gpus", 0) < s.get("max_ranks", 0) for s in setups)


def beside_upstream(steps: Mapping[str, Steps]) -> dict[str, float]:
    """How far the first scores of the two engines are apart, where their ranks have as many slots
    for experts: what a dummy expert weighs depends on its slot."""
    first = [_of(of_engine, "first score") for of_engine in steps.values()]
    setups = [_of(of_engine, "start").get("setup", {}) for of_engine in steps.values()]
    alike = {(s.get("layers"), s.get("floor")) for s in setups}
    if len(first) < 2 or len(alike) > 1 or not all(first):
        return {}
    found = worst_difference(*(score["logprobs"] for score in first))
    return {} if found is None else {"logprob_upstream_max_abs_err": found}


def _of(steps: Steps, name: str) -> Mapping[str, Any]:
    return next((s for s in steps if s["step"] == name), {})


def metrics_of(steps: Steps) -> dict[str, float]:
    """The worst of each kind: an operation that failed counts too."""
    found: dict[str, float] = {}

    def worst(name: str, value: float | None) -> None:
        if value is not None:
            found[name] = max(value, found.get(name, 0.0))

    for step in steps:
        if step["step"] == "start":
            worst("cold_start_s", step["cold_start_s"])
        elif step["step"] == "scale":
            way = "up" if step["to"] > step["from"] else "down"
            serves = step["ok"] and None not in step.get("joiner_first_token_s", {}).values()
            worst(f"{way}_failed", float(not serves))
            # One whose joiners never made a token was quick for nothing.
            worst(f"{way}{_joined_by(step)}{'' if serves else '_in_vain'}_s", step["total_s"])
            worst(f"gap_{way}_s", step["seen"]["longest_gap_s"])
            worst("moved_gap_max_s", step["seen"].get("moved_gap_max_s"))
            for name, counted in (("requests", "requests"), ("requests_failed", "failed")):
                found[name] = found.get(name, 0) + step["seen"][counted]
        elif step["step"] == "score":
            errors = [e for e in step["max_abs_err_by_rank"].values() if e is not None]
            worst("logprob_max_abs_err", max(errors, default=0.0))
            worst("ranks_without_score", float(len(step["max_abs_err_by_rank"]) - len(errors)))
        elif step["step"] == "prompts":
            worst("prompts_scored", step["number"])
            worst("prompts_token_max_abs_err", step["token_max_abs_err"])
            worst("prompts_max_abs_err", step["prompt_max_abs_err"])
            worst("prompts_missing", step["missing"])
    for name, value in _image(steps):
        worst(name, value)
    return found | rounds_metrics(steps) | faults_metrics(steps)


def _joined_by(step: Mapping[str, Any]) -> str:
    """How those who joined came: the slowest way of them, from nothing first."""
    tiers = {joiner["tier"] for joiner in step.get("joiners") or ()}
    named = [tier for tier in (COLD, "image", "parked", "kept") if tier in tiers]
    return f"_{named[0]}" if named else ""


def _image(steps: Steps) -> Iterator[tuple[str, float]]:
    """Of images of ranks: what they take on disk, and their seconds."""
    for step in steps:
        if step["step"] == "image":
            yield "image_bytes", step["image_bytes"]
            yield "image_take_s", step["total_s"]


def ramp_metrics(steps: Steps, folder: Path) -> dict[str, float]:
    """By mode; and the group that was scaled against the static ones over the same time: against
    the small one until it had grown, against the large one from then on."""
    found: dict[str, float] = {}
    ends: dict[str, Mapping[str, Any]] = {}
    for step in steps:
        if step["step"] == "ramp":
            ends[step["mode"]] = step
            name = f"ramp_{step['mode']}"
            found[f"{name}_requests"] = step["requests"]
            found[f"{name}_failed"] = step["failed"]
            found[f"{name}_p95_s"] = step["p95_all_s"]
    scaled = ends.get(Mode.SCALED)
    if scaled is None:
        return found
    change_s, until_s = scaled["trace_s"] / 2, scaled["change"]["until_s"]
    parts = {Mode.SMALL: (change_s, until_s), Mode.LARGE: (until_s, scaled["trace_s"])}
    for mode, part in parts.items():
        p95 = [_p95(folder, each, *part) for each in (Mode.SCALED, mode)]
        if mode in ends and p95[0] is not None and p95[1]:
            found[f"ramp_scaled_to_{mode}"] = p95[0] / p95[1]
    return found


def _p95(folder: Path, mode: str, since_s: float, until_s: float) -> float | None:
    path = folder / f"ramp-{mode}.json"
    if not path.exists():
        return None
    return p95_between([Waited(**w) for w in json.loads(path.read_text())], since_s, until_s)
