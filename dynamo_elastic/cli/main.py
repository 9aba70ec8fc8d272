"""`dynamo-elastic`: the command line. Every error is one line and an exit code other than 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from dynamo_elastic import __version__
from dynamo_elastic.cli import (
    agent,
    config,
    demo,
    doctor,
    scale,
    serve,
    snapshot,
    timeline,
    watch,
)
from dynamo_elastic.cli.exit_codes import BAD_INPUT, exit_code
from dynamo_elastic.config import FLAGS, SETTINGS
from dynamo_elastic.config_sources import from_flags
from dynamo_elastic.errors import ConfigError, ElasticError

WITHOUT_SETTINGS = ("demo", "version")
"""Commands that read no deployment: flags of settings would be ignored there."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("scale")(scale.scale)
app.command("status")(scale.status)
app.command("watch")(watch.watch)
app.command("timeline")(timeline.timeline)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(agent.app, name="agent")
app.add_typer(config.app, name="config")


@app.callback()
def root(context: typer.Context) -> None:
    """Elastic expert-parallel workers for NVIDIA Dynamo.

    Every setting of the deployment YAML has a flag (--elastic-scale-max-ranks 4) and a variable
    (DYN_ELASTIC_SCALE_MAX_RANKS=4), for every command: flag before variable before file.
    """
    if FLAGS.get() and context.invoked_subcommand in WITHOUT_SETTINGS:
        given = [g.origin for g in FLAGS.get().values()]
        raise ConfigError([f"{f}: {context.invoked_subcommand} has no settings" for f in given])


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. Exit codes: 0 done, 1 it failed, 2 bad input (nothing was changed), and those
    of cli/exit_codes.py."""
    flags, rest = from_flags(sys.argv[1:] if argv is None else argv, SETTINGS)
    outer = FLAGS.set(flags)
    try:
        app(args=rest, prog_name="dynamo-elastic")
    except ConfigError as exc:
        for fault in exc.faults:
            print(f"error: {fault}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except ElasticError as exc:
        print(f"error: {exc}", file=sys.stderr)
        sys.exit(exit_code(exc))
    finally:
        FLAGS.reset(outer)


if __name__ == "__main__":
    main()
