"""`python -m dynamo_elastic.testing.gpu_process CONTROL_DIR [flags]`: the GPU test engine."""

from __future__ import annotations

import logging
import os

from dynamo_elastic.engine.ending import until_it_ends
from dynamo_elastic.engine.renew import adopt_standard_files
from dynamo_elastic.testing.gpu_settings import parse


def main() -> None:
    """Run it on one thread per library, whose pools read the environment when they are imported.
    Whatever goes wrong is one line in the log, and the end of the process."""
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    settings = parse()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)

    def lives() -> None:
        adopt_standard_files()
        from dynamo_elastic.testing.gpu_engine import run

        run(settings)

    until_it_ends(lives)


if __name__ == "__main__":
    main()
