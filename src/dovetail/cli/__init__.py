"""The command `dovetail`. It starts without torch."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from dovetail.cli import checkpoint
from dovetail.errors import DovetailError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dovetail",
    help="Train PyTorch models from pieces that fit together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Run the command line. A user's mistake is one sentence on stderr and exit code 1."""
    try:
        app()
    except DovetailError as error:
        print(f"dovetail: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dovetail {metadata.version('dovetail')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train PyTorch models from pieces that fit together."""
