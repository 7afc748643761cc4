"""How the work of another process arrives: what can be brought back, and its errors as if they had been raised here."""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from dovetail import errors
from dovetail.checkpoint.encoding import encode
from dovetail.errors import CheckpointError, DovetailError, add_note

__all__ = ["TrainingProcessError", "described", "is_storable", "rebuilt", "share_of_threads"]


class TrainingProcessError(DovetailError):
    """Training in a process of its own brought no result; where the child could tell why, a note has its traceback."""


def share_of_threads(limit: int) -> int:
    """Threads for each of `limit` processes; more than there are cores wait for each other, spinning."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores // limit))


def is_storable(name: str, value: Any) -> bool:
    """Whether a value can be brought back."""
    try:
        encode({name: value})
    except CheckpointError:
        return False
    return True


def described(error: Exception) -> dict[str, Any]:
    """Return an error as plain values, for `rebuilt`."""
    kind = type(error)
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "message": str(error),
        "args": [it for it in error.args if isinstance(it, (str, int, float))],
        "notes": list(getattr(error, "__notes__", [])),
        "traceback": "".join(traceback.format_exception(error)),
    }


def rebuilt(described: Mapping[str, Any]) -> Exception:
    """Return the child's error: of its own type where that is Python's or ours and says the same again."""
    module, name, message = described["module"], described["name"], described["message"]
    known = {"builtins": builtins, "dovetail.errors": errors}.get(module)
    kind = vars(known).get(name) if known is not None else None
    error: Exception | None = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        error = _saying(message, kind, described["args"])
    if error is None:
        error = TrainingProcessError(f"training in a process of its own failed: {module}.{name}: {message}")
    for note in (*described["notes"], f"In the training process:\n{described['traceback']}"):
        add_note(error, note)
    return error


def _saying(message: str, kind: type[Exception], arguments: list[Any]) -> Exception | None:
    # KeyError shows its argument's repr, and UnknownNameError makes its sentence from several: no one way suits all.
    for given in (arguments, [message]):
        with suppress(Exception):
            error = kind.__new__(kind, *given)
            if str(error) == message:
                return error
    return None
