"""N GPUs: joiners and members killed and stopped at nine moments; how long streams paused.

The GPU tests do it, and check every token: `tests/gpu/engine/test_faults.py`. This keeps what they
measured: `python benchmarks/gpu_faults.py`. Exits with 1 if a case failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from provenance import write_result

ROOT = Path(__file__).parents[1]
TESTS = "tests/gpu/engine/test_faults.py"
TIMEOUT_S = 540.0


def play(folder: Path) -> tuple[dict[str, float], dict[str, str], int]:
    """Run the cases: the longest gap of each that passed, why each other failed, and how many need
    more GPUs."""
    verdicts = folder / "verdicts.xml"
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={verdicts}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, TESTS],
        cwd=ROOT,
        env={**os.environ, "OUT": str(folder)},
        timeout=TIMEOUT_S,
        check=False,
    )
    path = folder / "faults.jsonl"
    rows = [json.loads(line) for line in (path.read_text().splitlines() if path.exists() else ())]
    gaps = {f"{r['case']}, {'-'.join(map(str, r['ranks']))}": r["longest_gap_s"] for r in rows}
    failed: dict[str, str] = {}
    skipped = 0
    for case in ElementTree.parse(verdicts).iter("testcase"):
        skipped += case.find("skipped") is not None
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        if fault is not None:
            failed[case.get("name", "")] = fault.get("message", "")[:300]
    return gaps, failed, skipped


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gaps, failed, skipped = play(Path(folder))
    metrics = {
        "cases": len(gaps) + len(failed),
        "passed": len(gaps),
        "longest_gap_max_s": max(gaps.values(), default=0.0),
    }
    detail = {"longest_gap_s": gaps, "failed": failed, "need_more_gpus": skipped}
    print(write_result("gpu_faults", metrics, detail))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
