"""Command line `dovetail`, which starts without importing torch."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Annotated, Any

import typer
from typer.main import get_command

from dovetail.cli import checkpoint, experiment, job, trial
from dovetail.cli.dashboard import dashboard
from dovetail.cli.demo import demo
from dovetail.cli.doctor import doctor
from dovetail.cli.federate import federate
from dovetail.cli.new import new
from dovetail.cli.output import EXIT_CODES, print_line
from dovetail.cli.plan import plan
from dovetail.cli.ui import ui
from dovetail.errors import DovetailError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dovetail",
    help="Train PyTorch models from pieces that fit together.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    # An unexpected error shows Python's own traceback, which can be searched and pasted.
    pretty_exceptions_enable=False,
)
app.add_typer(experiment.app, name="experiment")
app.add_typer(trial.app, name="trial")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(job.app, name="job")
app.command()(dashboard)
app.command()(demo)
app.command()(doctor)
app.command()(federate)
app.command()(new)
app.command(context_settings={"ignore_unknown_options": True})(plan)
app.command()(ui)
# The short names of Determined's command line.
app.add_typer(experiment.app, name="e", hidden=True)
app.add_typer(trial.app, name="t", hidden=True)
app.add_typer(checkpoint.app, name="c", hidden=True)


def main() -> None:
    """Run the command line. A mistake of the user prints one sentence on stderr, and the exit code is 1."""
    with warnings.catch_warnings():
        # A warning is a sentence for the user here; a file and a line of this library would not help.
        warnings.showwarning = _print_warning
        try:
            _command()()
        # Errors of these types have a message for the user; any other type is a bug and keeps its traceback.
        except (DovetailError, OSError) as error:
            print_line(f"dovetail: {error}", to_stderr=True)
            raise SystemExit(1) from None


@cache
def _command() -> Any:
    """Return the command with all subcommands: once, because a call of `app` would build all of them again."""
    return get_command(app)


def _print_warning(message: Warning | str, *place: Any, **more: Any) -> None:
    print_line(f"dovetail: warning: {message}", to_stderr=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"dovetail {metadata.version('dovetail')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models from pieces that fit together."""
