"""Web server for WSGI applications that is reachable from this machine only, and only with a token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import BaseServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from dovetail.runtime.signals import SignalHandler
from dovetail.ui.guard import HOST, Guard, Request


class Guarded:
    """A WSGI application behind checks of host, origin and token: `dovetail.ui.guard`.

    Attributes:
        token: The random text that every request needs.

    Example:
        >>> guarded = Guarded(lambda environment, start: [])
        >>> said = []
        >>> _ = guarded({"HTTP_HOST": "evil.example", "SERVER_PORT": "80"}, lambda status, headers: said.append(status))
        >>> said
        ['403 Forbidden']
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._guard = Guard("dovetail dashboard")
        self._application = application

    @property
    def token(self) -> str:
        """The random text that every request needs."""
        return self._guard.token

    def address(self, url: str) -> str:
        """Return the address of a page with the token, for the user to open."""
        return self._guard.address(url)

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Handle a request."""
        answer = self._guard.answer(
            Request(
                method=environment.get("REQUEST_METHOD", ""),
                path=environment.get("PATH_INFO", ""),
                query=environment.get("QUERY_STRING", ""),
                host=environment.get("HTTP_HOST", ""),
                origin=environment.get("HTTP_ORIGIN"),
                cookie=environment.get("HTTP_COOKIE", ""),
                port=environment["SERVER_PORT"],
            )
        )
        if answer is None:
            return self._application(environment, start)
        text = f"{answer.text}\n".encode() if answer.text else b""
        kind = [("Content-Type", "text/plain; charset=utf-8")] if text else []
        start(answer.status, [*kind, *answer.headers, ("Content-Length", str(len(text)))])
        return [text] if text else []


class LocalServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application with one thread per request, because a page sends many requests at once.

    Args:
        port: The port; 0 means any free port, which `server_port` contains.
        application: The WSGI application.

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
    """Serve requests until SIGINT or SIGTERM.

    Args:
        server: The server.
        announce: Called when the server is ready; from then on it may be stopped.
    """
    # In a thread, because `shutdown` waits for the serving loop, which the signal has interrupted.
    with SignalHandler(lambda number: threading.Thread(target=server.shutdown).start(), replaces_all=True):
        announce()
        server.serve_forever(poll_interval=0.1)


class _Quiet(WSGIRequestHandler):
    """Handles requests without logging them."""

    def log_message(self, format: str, *args: Any) -> None:
        pass
