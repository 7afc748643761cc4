from __future__ import annotations

import pytest

from dovetail.errors import UnknownNameError
from dovetail.runtime import relay
from dovetail.runtime.relay import TrainingProcessError


class _OwnError(Exception):
    pass


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return relay.rebuild_error(relay.describe_error(caught))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("name"),
        FileNotFoundError(2, "No such file", "data.csv"),
        UnknownNameError("optimizer", "Adm", ["Adam"]),
        ZeroDivisionError(),
    ],
)
def test_an_error_of_python_or_dovetail_keeps_its_type(error: Exception) -> None:
    again = raised(error)
    assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize("error", [_OwnError("mine"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")])
def test_any_other_error_is_wrapped_in_ours_by_name(error: Exception) -> None:
    again = raised(error)
    assert type(again) is TrainingProcessError
    assert str(again).endswith(f"{type(error).__qualname__}: {error}")


def test_more_processes_than_cores_have_one_thread_each() -> None:
    assert relay.share_of_threads(10**6) == 1
