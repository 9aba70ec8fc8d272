"""All benchmarks by one command: `python benchmarks list | run NAME [ARGS] | validate | report`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# Found however we were started: `python benchmarks` or `python -m benchmarks`.
sys.path.insert(0, str(Path(__file__).parent))

from catalog import BENCHMARKS, HERE, by_name
from results import RESULTS, newest_results, problems


def list_all() -> int:
    """Every benchmark, what it needs, and when it was last run."""
    newest = newest_results()
    for benchmark in BENCHMARKS:
        known = newest.get(benchmark.name)
        when = f"result of {known['date']}" if known else "no result"
        print(f"{benchmark.name:18} {when:20} needs {benchmark.needs}")
        print(f"{'':18} {benchmark.summary}")
    return 0


def run(name: str, arguments: list[str]) -> int:
    """Run the script of benchmark `name`; its exit status."""
    try:
        benchmark = by_name(name)
    except KeyError:
        known = ", ".join(b.name for b in BENCHMARKS)
        print(f"run: there is no benchmark {name!r}; there are {known}", file=sys.stderr)
        return 2
    command = [sys.executable, *benchmark.argv, *arguments]
    return subprocess.run(command, cwd=HERE.parent, check=False).returncode


def validate() -> int:
    """Every result against the schema."""
    found = problems()
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(list(RESULTS.glob('*.json')))} results, {len(found)} problems")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every benchmark, what it shows and needs")
    runs = commands.add_parser("run", help="run one; what follows its name goes to it")
    runs.add_argument("name")
    runs.add_argument("arguments", nargs=argparse.REMAINDER)
    commands.add_parser("validate", help="check every result against the schema")
    commands.add_parser("report", help="write docs/benchmarks.md, its plots and its page")
    args = parser.parse_args()
    if args.command == "run":
        return run(args.name, args.arguments)
    if args.command == "report":
        import report  # and matplotlib with it

        return report.main()
    return {"list": list_all, "validate": validate}[args.command]()


if __name__ == "__main__":
    sys.exit(main())
