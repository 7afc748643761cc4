"""Command `dovetail dashboard`: the experiments in a browser, on this machine only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.output import Home, StoreUrl, open_store
from dovetail.errors import ConfigError
from dovetail.extras import require


def dashboard(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 means any free port.")] = 8080,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Start TensorBoard, too.")] = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Show experiments in a browser, with optuna-dashboard, until Ctrl-C.

    The printed address contains a token, without which no other user of this machine can read or change anything.
    """
    from dovetail.cli.serving import Guarded, LocalServer, serve
    from dovetail.ui.guard import HOST

    pages = require("optuna_dashboard", "dashboard")
    opened = open_store(home, store)
    guarded = Guarded(pages.wsgi(opened.storage))
    try:
        # Bound before the address is printed: the port may be taken, and 0 becomes a number only here.
        server = LocalServer(port, guarded)
    except OSError as error:
        raise ConfigError(f"port {port}: {error.strerror}: choose another --port, or 0 for any") from error

    def announce() -> None:
        print(f"experiments: {guarded.address(f'http://{HOST}:{server.server_port}/')}", flush=True)
        if tensorboard:
            print(f"TensorBoard: {_start_tensorboard(opened.home / 'experiments', HOST)}", flush=True)

    with server:
        serve(server, announce)


def _start_tensorboard(folder: Path, host: str) -> str:
    """Start TensorBoard in a thread, and return its address with its token."""
    from dovetail.cli.serving import Guarded

    program = require("tensorboard.program", "tensorboard")
    guards: list[Guarded] = []

    def make_server(application: Any, flags: Any) -> Any:
        guards.append(Guarded(application))
        # TensorBoard has no protection itself, so it gets the same token check.
        return program.WerkzeugServer(guards[-1], flags)

    board = program.TensorBoard(server_class=make_server)
    # TensorBoard's fast loader is a separate process, which would outlive this one.
    board.configure(argv=[None, "--logdir", str(folder), "--host", host, "--port", "0", "--load_fast", "false"])
    url = str(board.launch())
    return guards[-1].address(url)
