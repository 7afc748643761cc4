"""Web server that is reachable from this machine only, and only with a token.

A server on the loopback can be reached by every page in the user's browser and by every user of the machine. So each
request is checked: its `Host` must be this machine (otherwise a page whose domain name was changed to point to
127.0.0.1 could read and delete everything), its `Origin` must be the server itself, and it must contain the token,
which is part of the printed address and which the browser stores as a cookie.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from socketserver import BaseServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl, urlencode
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from dovetail.runtime.signals import SignalHandler

HOST = "127.0.0.1"
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
_TOKEN = "token"  # noqa: S105 - the name of a field


class Guarded:
    """A WSGI application behind checks of host, origin and token.

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
        self.token = secrets.token_urlsafe(24)
        self._application = application

    def address(self, url: str) -> str:
        """Return the address of a page with the token, for the user to open."""
        return f"{url}?{urlencode({_TOKEN: self.token})}"

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Handle a request."""
        host, origin = environment.get("HTTP_HOST", "").lower(), environment.get("HTTP_ORIGIN")
        # Any port is accepted, because ssh may forward another one. No other site can have these host names.
        if _HOSTS.fullmatch(host) is None:
            return _refused(start, "403 Forbidden", f"this server answers to {HOST} and localhost only")
        if origin is not None and origin.lower() != f"http://{host}":
            return _refused(start, "403 Forbidden", "requests of other pages are not answered")
        # Cookies are shared by all ports of a host: two dashboards need two names.
        cookie = f"dovetail-{environment['SERVER_PORT']}"
        query = parse_qsl(environment.get("QUERY_STRING", ""), keep_blank_values=True)
        given = [value for name, value in query if name == _TOKEN]
        # The token moves from the address to a cookie, so that it is not in the browser's history and in referrers.
        if given and environment.get("REQUEST_METHOD") == "GET":
            if not self._is_token(given[-1]):
                return _refused(start, "401 Unauthorized", _HOW)
            rest = urlencode([pair for pair in query if pair[0] != _TOKEN])
            path = environment.get("PATH_INFO") or "/"
            # Exactly one slash, because an address that starts with two leads to another host.
            place = "/" + path.lstrip("/") + (f"?{rest}" if rest else "")
            kept = f"{cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            headers = [("Location", place), ("Set-Cookie", kept), ("Referrer-Policy", "no-referrer")]
            start("303 See Other", [*headers, ("Cache-Control", "no-store"), ("Content-Length", "0")])
            return []
        if not any(self._is_token(value) for value in _cookies(environment, cookie)):
            return _refused(start, "401 Unauthorized", _HOW)
        return self._application(environment, start)

    def _is_token(self, text: str) -> bool:
        # Takes the same time for every wrong token, so that it cannot be guessed letter by letter.
        return hmac.compare_digest(text.encode("utf-8", "replace"), self.token.encode())


_HOW = "open the address that 'dovetail dashboard' has printed: it contains the token"


def _cookies(environment: dict[str, Any], name: str) -> list[str]:
    pairs = (each.strip().partition("=") for each in environment.get("HTTP_COOKIE", "").split(";"))
    return [value for key, _, value in pairs if key == name]


def _refused(start: Callable[..., Any], status: str, sentence: str) -> list[bytes]:
    text = f"{sentence}\n".encode()
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text)))])
    return [text]


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
