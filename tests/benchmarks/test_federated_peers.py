"""Peers of the federated benchmark: the measured rounds contain rounds only."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers() -> Iterator[Any]:
    """The module that peers run."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield import_module("federated_peers")
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("federated_peers", None)


def test_the_last_round_ends_before_the_shutdown(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("round\nround\n"))
    received = [(clients, capsys.readouterr().out) for clients in peers.each_round([[1], [2]])]
    assert received == [([1], "ready\n"), ([2], "done\n")]
    assert capsys.readouterr().out == "done\n"


def test_a_peer_waits_for_the_end_of_its_input_before_it_shuts_down(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = io.StringIO("round\nmore\n")
    monkeypatch.setattr(sys, "stdin", requests)
    assert list(peers.each_round([[1]])) == [[1]]
    assert requests.read() == ""
