"""A web server that can be asked to leave at any moment."""

from __future__ import annotations

import signal

import pytest

from dovetail.cli.serving import LocalServer, serve


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_hears_of_a_server_may_end_it_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with LocalServer(0, lambda environment, start: []) as server:
        serve(server, lambda: signal.raise_signal(number))
    assert signal.getsignal(number) is before
