"""Checks of every request to a local page: its host, its origin and its token.

A server on the loopback can be reached by every page in the user's browser and by every user of the machine. So each
request is checked: its `Host` must be this machine (otherwise a page whose domain name was changed to point to
127.0.0.1 could read and delete everything), its `Origin` must be the server itself, and it must contain the token,
which is part of the printed address and which the browser stores as a cookie.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

HOST = "127.0.0.1"
_HOSTS = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")
# The path below which a reverse proxy shows the page.
_PREFIX = re.compile(r"(/[\w.~-]+)*", re.ASCII)
_TOKEN = "token"  # noqa: S105 - the name of a field
# Nothing may be loaded from another machine, and no other page may show this one in a frame.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; frame-ancestors 'none'; "
    "base-uri 'self'; form-action 'self'"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Request:
    """The parts of a request that are checked.

    Attributes:
        method: The method, such as `GET`.
        path: The path of the address.
        query: The text after `?`.
        host: The header `Host`.
        origin: The header `Origin`; None if there is none.
        cookie: The header `Cookie`.
        port: The port of the server.
        prefix: The header `X-Forwarded-Prefix` of a reverse proxy.
    """

    method: str
    path: str
    query: str
    host: str
    origin: str | None
    cookie: str
    port: int | str
    prefix: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to a request that is not passed on."""

    status: str
    text: str = ""
    headers: tuple[tuple[str, str], ...] = ()


class Guard:
    """Decides about requests.

    Args:
        command: The command that prints the address, for the error message.
        hosts: Other host names that are accepted, of a reverse proxy.

    Attributes:
        token: The random text that every request needs.

    Example:
        >>> guard = Guard("dovetail ui")
        >>> guard.answer(Request("GET", "/", "", "evil.example", None, "", 80)).status
        '403 Forbidden'
        >>> guard.answer(Request("GET", "/", "", "localhost:80", None, f"dovetail-80={guard.token}", 80)) is None
        True
    """

    def __init__(self, command: str, hosts: Collection[str] = ()) -> None:
        self.token = secrets.token_urlsafe(24)
        self._how = f"open the address that '{command}' has printed: it contains the token"
        self._hosts = {host.lower() for host in hosts}

    def address(self, url: str) -> str:
        """Return the address of a page with the token, for the user to open."""
        return f"{url}?{urlencode({_TOKEN: self.token})}"

    def answer(self, request: Request) -> Answer | None:
        """Return the answer to a request, or None if the request is passed on."""
        host = request.host.lower()
        # Any port is accepted, because ssh may forward another one. No other site can have these host names.
        if _HOSTS.fullmatch(host) is None and host not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            return Answer("403 Forbidden", f"this server answers to {HOST} and localhost{known and ', '}{known} only")
        accepted = {f"http://{host}", *({f"https://{host}"} if host in self._hosts else ())}
        if request.origin is not None and request.origin.lower() not in accepted:
            return Answer("403 Forbidden", "requests of other pages are not answered")
        # Cookies are shared by all ports of a host: two pages need two names.
        cookie = f"dovetail-{request.port}"
        query = parse_qsl(request.query, keep_blank_values=True)
        given = [value for name, value in query if name == _TOKEN]
        # The token moves from the address to a cookie, so that it is not in the browser's history and in referrers.
        if given and request.method == "GET":
            if not self._is_token(given[-1]):
                return Answer("401 Unauthorized", self._how)
            rest = urlencode([pair for pair in query if pair[0] != _TOKEN])
            # Exactly one slash, because an address that starts with two leads to another host.
            prefix = request.prefix if _PREFIX.fullmatch(request.prefix) else ""
            place = f"{prefix}/" + (request.path or "/").lstrip("/") + (f"?{rest}" if rest else "")
            secure = "; Secure" if host in self._hosts else ""
            # Other applications of the proxy do not get the cookie.
            kept = f"{cookie}={self.token}; Path={prefix or '/'}; HttpOnly; SameSite=Strict{secure}"
            headers = (("Location", place), ("Set-Cookie", kept), ("Referrer-Policy", "no-referrer"))
            return Answer("303 See Other", "", (*headers, ("Cache-Control", "no-store")))
        if not any(self._is_token(value) for value in _cookies(request.cookie, cookie)):
            return Answer("401 Unauthorized", self._how)
        return None

    def _is_token(self, text: str) -> bool:
        # Takes the same time for every wrong token, so that it cannot be guessed letter by letter.
        return hmac.compare_digest(text.encode("utf-8", "replace"), self.token.encode())


def _cookies(header: str, name: str) -> list[str]:
    pairs = (each.strip().partition("=") for each in header.split(";"))
    return [value for key, _, value in pairs if key == name]


class GuardedWsgi:
    """A WSGI application behind a guard.

    Args:
        application: The application.
        command: The command that prints the address, for the error message.

    Example:
        >>> guarded = GuardedWsgi(lambda environment, start: [], "dovetail dashboard")
        >>> said = []
        >>> _ = guarded({"HTTP_HOST": "evil.example", "SERVER_PORT": "80"}, lambda status, headers: said.append(status))
        >>> said
        ['403 Forbidden']
    """

    def __init__(self, application: Callable[..., Iterable[bytes]], command: str) -> None:
        self._guard, self._application = Guard(command), application

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


class GuardedAsgi:
    """An ASGI application behind a guard; its answers let a browser load nothing from other machines.

    Args:
        application: The application.
        guard: Decides about requests.
        before_request: Called before a request is passed on; None means nothing.
    """

    def __init__(
        self,
        application: Callable[[Scope, Receive, Send], Awaitable[None]],
        guard: Guard,
        before_request: Callable[[], None] | None = None,
    ) -> None:
        self._application, self._guard, self._before = application, guard, before_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request or a connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._application(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        server = scope.get("server") or (HOST, 0)
        answer = self._guard.answer(
            Request(
                method=scope.get("method", "WEBSOCKET"),
                path=scope["path"],
                query=scope["query_string"].decode("latin-1"),
                host=headers.get("host", ""),
                origin=headers.get("origin"),
                cookie=headers.get("cookie", ""),
                port=server[1] or 0,
                prefix=headers.get("x-forwarded-prefix", ""),
            )
        )
        if answer is None:
            if self._before is not None:
                self._before()
            await self._application(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _send(answer, send)


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *((k.encode(), v.encode()) for k, v in _HEADERS)]
        await send(message)

    return sending


async def _send(answer: Answer, send: Send) -> None:
    text = f"{answer.text}\n".encode() if answer.text else b""
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text))), *answer.headers]
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    await send({"type": "http.response.start", "status": int(answer.status[:3]), "headers": encoded})
    await send({"type": "http.response.body", "body": text})
