"""Command `dovetail ui`: a live page of runs, experiments and federations, on this machine only."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.output import Home
from dovetail.extras import require


def ui(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FOLDER | STORE_URL]...",
            help="Folders with runs, stores or federations, and URLs of database servers.",
            show_default="this folder",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 means any free port.")] = 8081,
    read_only: Annotated[bool, typer.Option("--read-only", help="Reject every change: notes and commands.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Accept this host name, too: that of a reverse proxy.")
    ] = None,
    home: Home = None,
) -> None:
    """Show runs, experiments and federations in a browser, live, until Ctrl-C.

    The printed address contains a token, without which no other user of this machine can read or change anything.
    """
    from dovetail.ui.library import Library
    from dovetail.ui.server import serve

    require("nicegui", "ui")
    library = Library(places or [], home)
    serve(library, port, lambda address: print(f"page: {address}", flush=True), read_only=read_only,
          hosts=allow_host or ())  # fmt: skip
