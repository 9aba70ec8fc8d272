"""`python -m dynamo_elastic.dynamo.vllm_elastic CONTROL_DIR FLAGS...`: one rank of an elastic group
of vLLM 0.33 under Dynamo's own worker, with the flags of `dynamo.vllm`.

Dynamo's order is engine first, runtime second. A rank boots without a group, lets go of all that an
image must not hold, and gets its identity; then come runtime, lease and registration, and
CONTROL_DIR/engine.sock answers its shell. A founder, one of the first ranks of a group,
boots in that group instead, and lets go of nothing: it can't be put into an image.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from dynamo_elastic.engine.vllm.elastic.flags import (
    FOUNDS_VARIABLE,
    detached_environment,
    elastic_environment,
)
from dynamo_elastic.engine.vllm.life import run


def main() -> None:
    """Run the rank until it is killed. Whatever goes wrong is in the log, and ends the process."""
    began_s = time.monotonic()
    control_dir, *argv = sys.argv[1:]
    founds = int(os.environ.get(FOUNDS_VARIABLE, "0")) > 0
    os.environ |= elastic_environment(park=True) if founds else detached_environment(control_dir)
    run(lambda: _tree(Path(control_dir), began_s, founds=founds).live(argv))


def _tree(control_dir: Path, began_s: float, *, founds: bool) -> Any:
    # Not at the top: its children import this module too.
    from dynamo_elastic.dynamo.vllm_elastic_tree import ElasticTree

    return ElasticTree(control_dir, began_s, founds=founds)


if __name__ == "__main__":
    main()
