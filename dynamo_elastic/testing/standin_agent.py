"""`python -m dynamo_elastic.testing.standin_agent DIRECTORY`: an agent whose engines stand in."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from dynamo_elastic.agent.image_source import NoImages
from dynamo_elastic.agent.main import serve
from dynamo_elastic.testing.deployments import deployment, standin_argv


def main() -> None:
    """Serve the deployment of the directory until told to end."""
    config = deployment(Path(sys.argv[1]))
    asyncio.run(serve(config, NoImages("none made"), standin_argv("--mb", "4")))


if __name__ == "__main__":
    main()
