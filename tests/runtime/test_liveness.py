"""Limits for processes that do not take part; `tests/reliability/test_group.py` stops real ones."""

from __future__ import annotations

import pytest

from dovetail.errors import ConfigError
from dovetail.runtime.liveness import Limits, neighbour, own_address


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_SILENT_SECONDS", "2.5")
    monkeypatch.setenv("DOVETAIL_LATE_SECONDS", "0")
    monkeypatch.setenv("DOVETAIL_OVERDUE_SECONDS", "7")
    assert Limits.from_environment() == Limits(stopped=4.0, silent=2.5, late=0.0, overdue=7.0)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_limit_must_be_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DOVETAIL_STOPPED_SECONDS", text)
    with pytest.raises(ConfigError, match=f"DOVETAIL_STOPPED_SECONDS: expected a number of seconds.*{text!r}"):
        Limits.from_environment()


def test_a_process_of_another_container_is_no_neighbour() -> None:
    own = own_address()
    assert neighbour(own) is not None
    assert neighbour(own.replace("pid:[", "pid:[9")) is None
    assert neighbour("{}") is None
