"""`dynamo-elastic`: the command line. Every error is one line and an exit code other than 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from dynamo_elastic import __version__
from dynamo_elastic.cli import agent, demo, scale, serve, snapshot
from dynamo_elastic.cli.exit_codes import BAD_INPUT, exit_code
from dynamo_elastic.errors import ConfigError, ElasticError

app = typer.Typer(
    help="Elastic expert-parallel workers for NVIDIA Dynamo.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("scale")(scale.scale)
app.command("status")(scale.status)
app.command("demo")(demo.demo)
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(agent.app, name="agent")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. Exit codes: 0 done, 1 it failed, 2 bad input (nothing was changed), and those
    of cli/exit_codes.py."""
    try:
        app(args=argv, prog_name="dynamo-elastic")
    except ConfigError as exc:
        for fault in exc.faults:
            print(f"error: {fault}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except ElasticError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(exit_code(exc))


if __name__ == "__main__":
    main()
