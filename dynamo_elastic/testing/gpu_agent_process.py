"""`python -m dynamo_elastic.testing.gpu_agent_process SETTINGS`: the agent of GPU test engines.

SETTINGS is JSON: {"config": a deployment, "sizes": fields of GpuEngineSettings}. With {"create":
slot} it makes an image of that slot instead, and ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from dynamo_elastic.agent.main import serve
from dynamo_elastic.agent.open_images import images_or_reason, open_images
from dynamo_elastic.config import parse_config
from dynamo_elastic.failpoints import arm_from_environment
from dynamo_elastic.snapshot.gpu import open_gpu
from dynamo_elastic.testing.gpu_settings import gpu_argv


def main() -> None:
    """Serve until told to end, or make one image."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    arm_from_environment()
    settings = json.loads(sys.argv[1])
    config = parse_config(settings["config"])
    argv_of = gpu_argv(**settings["sizes"])
    if "create" in settings:
        open_images(config, argv_of).create(settings["create"])
    else:
        gpu = open_gpu()
        asyncio.run(serve(config, images_or_reason(config, argv_of, gpu), argv_of, gpu))


if __name__ == "__main__":
    main()
