"""`dynamo-elastic serve -f deployment.yaml`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynamo_elastic.config import DeploymentConfig, load_config
from dynamo_elastic.serve.deployment import running
from dynamo_elastic.serve.dry_run import dry_run

ConfigFile = Annotated[
    Path,
    typer.Option("-f", "--file", envvar="DYN_ELASTIC_CONFIG", help="Deployment YAML."),
]


_STYLES = {"name": "bold", "note": "dim", "environment": "cyan", "command": ""}


def serve(
    file: ConfigFile,
    only_show: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the processes, their environment and commands in order; start nothing.",
        ),
    ] = False,
) -> None:
    """Run a whole deployment on this machine until Ctrl-C; then stop all of it.

    Settings, ports, programs and the model are checked before anything starts; every fault is one
    line with its source and its remedy. A dry run checks the settings alone.
    """
    config = load_config(file)
    if only_show:
        console = Console(highlight=False, soft_wrap=True)
        for line, style in dry_run(config):
            console.print(line, style=_STYLES[style], markup=False)
        return
    asyncio.run(_serve(config, file))


async def _serve(config: DeploymentConfig, file: Path) -> None:
    console = Console(stderr=True, highlight=False)
    stop_on_signal()
    try:
        async with running(config, lambda text: console.print(f"[dim]{text}[/dim]")) as deployment:
            console.print(
                f"serving [bold]{config.model.name}[/bold] on {config.scale.initial_ranks} ranks"
            )
            if config.frontend.enabled:
                console.print(f"OpenAI API: {deployment.url}/v1")
            if config.coordinator.api.port:
                api = config.coordinator.api
                scheme = "http" if api.cert_file is None else "https"
                console.print(f"HTTP API:   {scheme}://{api.host}:{api.port}/v1/status")
                console.print(f"its token:  {config.api_token_file}")
            console.print(f"reports:    {config.operations_dir}")
            console.print(f"scale it:   dynamo-elastic scale N -f {file}")
            raise await deployment.supervisor.failed
    except asyncio.CancelledError:
        console.print("stopped; nothing is left running")


def stop_on_signal() -> None:
    """Cancel the current task at the first SIGINT or SIGTERM, so that it can clean up; later ones
    are ignored: clean-up has its own deadlines."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def stop() -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, lambda: None)
        if task is not None:
            task.cancel()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop)
