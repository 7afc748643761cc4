"""A small web server that only this machine can reach."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from socketserver import BaseServer, ThreadingMixIn
from types import FrameType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

__all__ = ["HOST", "LocalServer", "serve"]

HOST = "127.0.0.1"


class LocalServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application, one thread per request: a page asks for many things at once.

    Args:
        port: 0 for any that is free; `server_port` is the one it got.
        application: What answers.

    Example:
        >>> with LocalServer(0, lambda environment, start: []) as server:
        ...     server.server_address[0]
        '127.0.0.1'
    """

    daemon_threads = True

    def __init__(self, port: int, application: Callable[..., Any]) -> None:
        super().__init__((HOST, port), _Quiet)
        self.set_app(application)


def serve(server: BaseServer, announce: Callable[[], None]) -> None:
    """Answer until SIGINT or SIGTERM.

    Args:
        server: Who answers.
        announce: Says so. Whoever has heard it may end the server at once.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        # In a thread: it waits for the very loop that was interrupted to call this.
        threading.Thread(target=server.shutdown).start()

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        announce()
        server.serve_forever(poll_interval=0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Quiet(WSGIRequestHandler):
    """Says nothing about every request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass
