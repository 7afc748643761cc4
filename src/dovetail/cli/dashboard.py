"""Command `dovetail dashboard`: the live page of the experiments of a store, on this machine only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.output import Home, StoreUrl, open_store
from dovetail.extras import require


def dashboard(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 means any free port.")] = 8080,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Start TensorBoard, too.")] = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Show the experiments of a store in the page of `dovetail ui`, live, until Ctrl-C.

    The printed address contains a token, without which no other user of this machine can read or change anything.
    """
    from dovetail.ui.guard import HOST
    from dovetail.ui.library import Library
    from dovetail.ui.server import serve

    require("nicegui", "ui")
    # Reports in one sentence that there are no experiments, or that the database server does not respond.
    opened = open_store(home, store)

    def announce(address: str) -> None:
        print(f"experiments: {address}", flush=True)
        if tensorboard:
            print(f"TensorBoard: {_start_tensorboard(opened.home / 'experiments', HOST)}", flush=True)

    library = Library([store or opened.home], opened.home)
    serve(library, port, announce, command="dovetail dashboard")


def _start_tensorboard(folder: Path, host: str) -> str:
    """Start TensorBoard in a thread, and return its address with its token."""
    from dovetail.ui.guard import GuardedWsgi

    program = require("tensorboard.program", "tensorboard")
    guards: list[GuardedWsgi] = []

    def make_server(application: Any, flags: Any) -> Any:
        guards.append(GuardedWsgi(application, "dovetail dashboard"))
        # TensorBoard has no protection itself, so it gets the same token check.
        return program.WerkzeugServer(guards[-1], flags)

    board = program.TensorBoard(server_class=make_server)
    # TensorBoard's fast loader is a separate process, which would outlive this one.
    board.configure(argv=[None, "--logdir", str(folder), "--host", host, "--port", "0", "--load_fast", "false"])
    url = str(board.launch())
    return guards[-1].address(url)
