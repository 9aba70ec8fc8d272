"""The tables of docs/gpu.md, made of the newest result of each benchmark: nobody types a number.

    python benchmarks/gpu_tables.py             # writes them
    python benchmarks/gpu_tables.py --check     # exits with 1 if they are not up to date

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
NOT_RUN = "Not run yet."
Metrics = Mapping[str, float]

SCALE: Sequence[tuple[str, str, str]] = (
    ("up_image_s", "request to a joiner's first token, from an image", "3"),
    ("up_parked_s", "the same, from a parked engine", "1"),
    ("down_s", "request to GPUs that are free", "1.5"),
    ("token_gap_up_max_s", "longest gap in a stream that stays, scaling up", "0.05"),
    ("token_gap_down_max_s", "the same, scaling down", "0.05"),
    ("moved_gap_max_s", "longest gap of a stream that moves", ""),
    ("up_image_rebalance_gap_max_s", "longest gap while experts move", ""),
    ("requests_failed", "requests that failed", "0"),
    ("requests_total", "of so many", ""),
    ("logits_max_rel_err", "logits against one rank with every expert, relative error", ""),
    ("logits_same_best_token", "share of these with the same best token", ""),
    ("logits_max_rel_drift", "logits of any width and rank against those of the first", ""),
    ("bytes_per_rank", "GPU memory in use on a rank's GPU", ""),
)
STREAM: Sequence[tuple[str, str, str]] = (
    ("copy_gbps", "the copy engine alone", ""),
    ("mapped_1src_gbps", "pushed into mapped chunks, one source", ""),
    ("mapped_2src_gbps", "two sources", ""),
    ("mapped_3src_gbps", "three sources", ""),
    ("mapped_2x2_gbps", "two sources, two targets", ""),
    ("nixl_1src_gbps", "NIXL, one source", ""),
    ("nixl_2src_gbps", "NIXL, two sources", ""),
    ("nixl_3src_gbps", "NIXL, three sources", ""),
    ("nixl_2x2_gbps", "NIXL, two sources, two targets", ""),
    ("best_of_copy", "the best of them, as a share of the copy engine's", "at least 0.85"),
    ("digest_gbps", "digests", ""),
)
REBIND: Sequence[tuple[str, str, str]] = (
    ("nodes", "nodes", "at least 2880"),
    ("rebind_s", "rebound in", "0.3"),
    ("recapture_s", "captured again in", ""),
    ("replay_max_rel_err", "replays against eager, relative error", ""),
)
ROUNDS: Sequence[tuple[str, str, str]] = (
    ("rounds", "rounds", "20"),
    ("resizes", "resizes", ""),
    ("memory_growth_max", "growth of memory, of any GPU or engine", "0.01"),
    ("token_s_growth", "growth of the time for a token", "0.01"),
    ("up_s", "a scale-up, median", ""),
    ("down_s", "a scale-down, median", ""),
)


def newest(benchmark: str, results: Path = RESULTS) -> dict[str, Any] | None:
    paths = sorted(results.glob(f"{benchmark}-*.json"))
    return json.loads(paths[-1].read_text()) if paths else None


def plain(rows: Sequence[tuple[str, str, str]]) -> Callable[[Metrics], list[str]]:
    """A table with a line for each metric that there is."""

    def lines(metrics: Metrics) -> list[str]:
        head = ["| | measured | wanted | |", "|---|---|---|---|"]
        return head + [
            f"| {text} | {number(metrics[name], name)} | {wanted} | `{name}` |"
            for name, text, wanted in rows
            if name in metrics
        ]

    return lines


def capacity(metrics: Metrics) -> list[str]:
    keys = [name.split("_") for name in metrics if name.endswith("_comm_tokens_s")]
    capacities = sorted({int(key[1]) for key in keys})
    batches = sorted({int(key[3]) for key in keys})
    head = "| capacity | " + " | ".join(
        f"batch {b}: tokens/s | with padded experts | buffer" for b in batches
    )
    lines = [head + " |", "|---" * (1 + 3 * len(batches)) + "|"]
    for size in capacities:
        cells = [str(size)]
        for batch in batches:
            stem = f"capacity_{size}_batch_{batch}"
            least = f"capacity_{capacities[0]}_batch_{batch}"
            for kind in ("comm", "padded"):
                rate = metrics[f"{stem}_{kind}_tokens_s"]
                share = rate / metrics[f"{least}_{kind}_tokens_s"]
                cells.append(f"{rate:,.0f} ({share:.2f})")
            cells.append(f"{metrics[f'{stem}_buffer_bytes'] / 1e6:.0f} MB")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def phases(result: Mapping[str, Any]) -> list[str]:
    """What each operation of gpu_scale took, phase by phase."""
    suffix = "_phases_s"
    lines = ["| operation | phases, in seconds |", "|---|---|"]
    for name, parts in result["detail"].items():
        if name.endswith(suffix):
            text = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in parts.items())
            lines.append(f"| {name.removesuffix(suffix)} | {text} |")
    return lines


def number(value: float, name: str) -> str:
    """As people read it, by the unit in the metric's name.

    >>> number(30_100_000_000, "bytes_per_rank"), number(0.02531, "gap_s"), number(9000, "nodes")
    ('30.1 GB', '0.025', '9,000')
    """
    if "bytes" in name.split("_"):
        return f"{value / 1e9:.1f} GB"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3f}"


TABLES: Mapping[str, Callable[[Metrics], list[str]]] = {
    "gpu_scale": plain(SCALE),
    "gpu_stream": plain(STREAM),
    "gpu_rebind": plain(REBIND),
    "gpu_rounds": plain(ROUNDS),
    "gpu_capacity": capacity,
}


def table(benchmark: str, results: Path = RESULTS) -> str:
    """The table of `benchmark`, and where its numbers are from."""
    result = newest(benchmark, results)
    if result is None:
        return NOT_RUN
    lines = TABLES[benchmark](result["metrics"])
    if benchmark == "gpu_scale":
        lines += ["", *phases(result)]
    gpus = result["hardware"].get("gpus", [])
    kind = f"{len(gpus)} x {gpus[0].split(',')[0]}" if gpus else "no GPU"
    # A run that was cut off has part of the numbers.
    ended = "" if result["metrics"].get("completed", 1) else ", **not completed**"
    lines += ["", f"{kind}, {result['date']}, commit {result['commit']}{ended}."]
    return "\n".join(lines)


def filled(page: str, results: Path = RESULTS) -> str:
    """`page` with the tables that its marks ask for. Raises ValueError if a mark has no end."""
    for benchmark in TABLES:
        begin, end = (f"<!-- {benchmark}: {word} -->" for word in ("begin", "end"))
        if begin in page:
            before, _, rest = page.partition(begin)
            _, found, after = rest.partition(end)
            if not found:
                raise ValueError(f"{begin} has no end")
            page = f"{before}{begin}\n{table(benchmark, results)}\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    made = filled(page)
    if arguments.check:
        sys.exit("docs/gpu.md: run python benchmarks/gpu_tables.py" if made != page else 0)
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
