"""`python tests/fuzz/run.py [TARGET SECONDS]`: atheris on one target of testing/fuzz.py; with none
named, their names.

What it finds is written to crash-*, and is to become a seed there together with the mend.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["dynamo_elastic"]):
    from dynamo_elastic.testing.fuzz import TARGETS, seeds


def main() -> None:
    if len(sys.argv) == 1:
        sys.stdout.write("\n".join(TARGETS) + "\n")
        return
    target, seconds = sys.argv[1], sys.argv[2]
    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{target}-"))
    for number, seed in enumerate(seeds()[target]):
        (corpus / str(number)).write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-timeout=10", "-max_len=65536", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
