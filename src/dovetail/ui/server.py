"""Server of the page: nicegui behind the guard, on the loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from typing import Any

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.ui.guard import HOST, Guard, GuardedAsgi
from dovetail.ui.library import Library


def build_application(library: Library, guard: Guard, *, read_only: bool = False) -> Any:
    """Return the ASGI application of the page.

    Raises:
        MissingExtraError: nicegui is not installed.
    """
    require("nicegui", "ui")
    from fastapi import FastAPI
    from nicegui import ui

    from dovetail.ui.pages import add_pages

    application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(application, library, read_only=read_only)
    ui.run_with(
        application,
        title="Dovetail",
        dark=None,
        language="en-US",
        favicon="🕊️",
        show_welcome_message=False,
        binding_refresh_interval=None,
        reconnect_timeout=20.0,
        # On the loopback, compressing megabytes of scripts takes longer than sending them.
        gzip_middleware_factory=None,
    )
    return GuardedAsgi(application, guard, library.give_way)


def bind(port: int, host: str = HOST) -> socket.socket:
    """Return a socket that listens on a port.

    Raises:
        ConfigError: The port is taken.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ConfigError(f"port {port}: {error.strerror}: choose another --port, or 0 for any") from error
    return listening


def serve(
    library: Library,
    port: int,
    announce: Callable[[str], None],
    *,
    read_only: bool = False,
    hosts: Collection[str] = (),
    command: str = "dovetail ui",
) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        library: The runs, experiments and federations.
        port: The port; 0 means any free port.
        announce: Called with the address when the page can be opened.
        read_only: Reject every change.
        hosts: Other host names that are accepted, of a reverse proxy.
        command: The command that prints the address, for the error message.
    """
    # Bound before anything is imported, so that a taken port is reported at once.
    listening = bind(port)
    guard = Guard(command, hosts)
    library.start()
    application = build_application(library, guard, read_only=read_only)
    uvicorn = require("uvicorn", "ui")
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="on", ws_max_size=1 << 22))
    startup = server.startup

    async def announced(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets=sockets)
        announce(guard.address(f"http://{HOST}:{listening.getsockname()[1]}/"))

    server.startup = announced
    try:
        server.run(sockets=[listening])
    finally:
        library.stop()
        listening.close()
