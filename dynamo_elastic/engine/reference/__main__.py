"""`python -m dynamo_elastic.engine.reference`: one engine process; engine/launch.py has its
arguments."""

from __future__ import annotations

import os
import time


def main() -> None:
    """Run the engine, on one thread per library: their thread pools are read from the environment
    when they are imported, and do not survive in an image."""
    began_s = time.monotonic()
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    from dynamo_elastic.engine.reference.process import run

    run(began_s)


if __name__ == "__main__":
    main()
