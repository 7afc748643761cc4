"""The checks of host, origin and token, with real requests."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import pytest

from dovetail.ui.guard import Guard, GuardedWsgi, Request


class Quiet(WSGIRequestHandler):
    """Handles requests without logging them."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _hello(environment: dict[str, Any], start: Any) -> list[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [f"{environment['REQUEST_METHOD']} {environment['PATH_INFO']}".encode()]


class Browser:
    """Real requests to a guarded server."""

    def __init__(self, server: WSGIServer, guarded: GuardedWsgi) -> None:
        self.port, self.token = server.server_port, guarded.token
        self.address = guarded.address(f"http://127.0.0.1:{self.port}/")

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
        """Return the status, the text and the headers of an answer; `Cookie="valid"` sends the token."""
        if headers.get("Cookie") == "valid":
            headers["Cookie"] = f"other=1; dovetail-{self.port}={self.token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())
        finally:
            connection.close()


@pytest.fixture
def browser() -> Iterator[Browser]:
    guarded = GuardedWsgi(_hello, "dovetail dashboard")
    with WSGIServer(("127.0.0.1", 0), Quiet) as server:
        server.set_app(guarded)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Browser(server, guarded)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_a_request_with_host_and_token_is_answered(browser: Browser, method: str) -> None:
    for host in (f"127.0.0.1:{browser.port}", f"localhost:{browser.port}", f"LOCALHOST:{browser.port}"):
        assert browser.ask("/api", method, Host=host, Cookie="valid")[:2] == (200, f"{method} /api")
    # As it comes through a port that ssh forwards.
    forwarded = {"Host": "localhost:9000", "Origin": "http://localhost:9000"}
    assert browser.ask("/api", method, Cookie="valid", **forwarded)[0] == 200
    own = f"http://127.0.0.1:{browser.port}"
    assert browser.ask("/api", method, Cookie="valid", Origin=own)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost:{port}.evil", "", "[::1]:{port}"],
)
def test_a_foreign_host_is_forbidden_even_with_the_token(browser: Browser, host: str) -> None:
    assert browser.ask("/", Host=host.format(port=browser.port), Cookie="valid")[0] == 403
    assert browser.ask(f"/?token={browser.token}", Host=host.format(port=browser.port))[0] == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", ""]
)
def test_a_foreign_origin_is_forbidden_even_with_the_token(browser: Browser, origin: str) -> None:
    for method in ("GET", "DELETE", "OPTIONS"):
        assert browser.ask("/", method, Origin=origin.format(port=browser.port), Cookie="valid")[0] == 403


def test_a_request_without_the_token_explains_how_to_get_it(browser: Browser) -> None:
    for cookie in (
        "",
        "nonsense",
        "dovetail=x",
        f"dovetail-{browser.port}=",
        f"dovetail-{browser.port}=w\u00e4",
        ";=;",
    ):
        status, text, headers = browser.ask("/api", "DELETE", Cookie=cookie.encode("latin-1").decode("latin-1"))
        assert (status, "Set-Cookie" in headers) == (401, False)
        assert "open the address that 'dovetail dashboard' has printed" in text
    assert browser.ask("/?token=wrong", Cookie="valid")[0] == 401
    # Only a page that the user opens may bring the token in its address.
    assert browser.ask(f"/?token={browser.token}", "DELETE")[0] == 401


def test_the_printed_address_sets_a_cookie_and_redirects_without_the_token(browser: Browser) -> None:
    path = browser.address.removeprefix(f"http://127.0.0.1:{browser.port}")
    status, _, headers = browser.ask(path)
    assert (status, headers["Location"]) == (303, "/")
    name, _, attributes = headers["Set-Cookie"].partition("; ")
    assert name == f"dovetail-{browser.port}={browser.token}"
    assert attributes.split("; ") == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert browser.ask(headers["Location"], Cookie=name)[:2] == (200, "GET /")
    assert browser.ask(f"//evil.example/a?b=1&token={browser.token}")[2]["Location"] == "/evil.example/a?b=1"


def test_every_server_has_a_different_token() -> None:
    assert Guard("a").token != Guard("a").token


@pytest.mark.parametrize(
    ("prefix", "place"), [("/lab/runs", "/lab/runs/run?id=1"), ("//evil.example", "/run?id=1"), ("/a b", "/run?id=1")]
)
def test_a_redirect_keeps_the_path_of_a_proxy(prefix: str, place: str) -> None:
    guard = Guard("dovetail ui", ["runs.example.org"])
    query = f"id=1&token={guard.token}"
    answer = guard.answer(Request("GET", "/run", query, "runs.example.org", None, "", 80, prefix))
    assert answer is not None
    headers = dict(answer.headers)
    assert headers["Location"] == place
    path = "/lab/runs" if place.startswith("/lab") else "/"
    assert headers["Set-Cookie"].endswith(f"; Path={path}; HttpOnly; SameSite=Strict; Secure")
