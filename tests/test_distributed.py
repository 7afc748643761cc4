"""Reports about processes that do not take part; `tests/reliability/test_group.py` ends and stops real ones."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch.distributed as dist

from dovetail import distributed
from dovetail.distributed import Group, PeerError, StoppedPeerError
from dovetail.runtime.liveness import own_address


def _group(**addresses: str) -> Group:
    """Return the first of two processes, with the given keys in the store."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # exported, not to mypy
    for key, value in {"at/0": own_address(), **addresses}.items():
        store.set(key, value)
    group = Group.__new__(Group)
    group.rank = group._place = 0
    group.size = group._total = 2
    group._store = store
    return group


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_PATIENCE", 0.1)


def test_a_process_that_still_runs_is_not_reported_as_gone() -> None:
    error = _group(**{"at/1": own_address()}).lost()
    assert (type(error), str(error)) == (PeerError, "rank 1 did not take part in time, and still runs")


def test_a_process_that_has_ended_is_reported_as_gone() -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    error = _group(**{"at/1": json.dumps({**json.loads(own_address()), "pid": ended.pid})}).lost()
    assert (type(error), str(error)) == (PeerError, "rank 1 is gone")


def test_every_process_reports_the_one_that_another_process_found_stopped() -> None:
    error = _group(**{"at/1": own_address(), "late/1": "rank 1 was stopped"}).lost()
    assert (type(error), str(error)) == (StoppedPeerError, "rank 1 was stopped")
