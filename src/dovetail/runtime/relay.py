"""Settings, values and errors that pass between a process and its worker processes."""

from __future__ import annotations

import builtins
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dovetail import errors
from dovetail.checkpoint.encoding import encode
from dovetail.errors import CheckpointError, DovetailError, add_note
from dovetail.runtime.cores import threads_per_process


class TrainingProcessError(DovetailError):
    """Training in another process failed; if the process could report its error, a note has the traceback."""


def share_of_threads(limit: int) -> int:
    """Return the number of torch threads for each of `limit` processes: a share of the cores, at most as now."""
    return min(torch.get_num_threads(), threads_per_process(limit))


def arithmetic() -> dict[str, Any]:
    """Return torch's numeric settings as plain values, for `set_arithmetic` in another process."""
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }


def set_arithmetic(found: Mapping[str, Any], num_threads: int) -> None:
    """Apply the numeric settings of another process, and use `num_threads` threads."""
    # For processes that are started from here; torch itself has already read the variable.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    torch.set_num_threads(num_threads)
    torch.set_default_dtype(getattr(torch, found["dtype"]))
    # Only if it changes something: this call imports a compiler, which is slow.
    if any(found[name] != value for name, value in arithmetic().items() if name in ("deterministic", "warn_only")):
        torch.use_deterministic_algorithms(found["deterministic"], warn_only=found["warn_only"])
    torch.set_float32_matmul_precision(found["precision"])


def worker_settings(num_processes: int) -> dict[str, Any]:
    """Return the module path and the arithmetic that each of several workers receives for `apply_worker_settings`."""
    return {"path": sys.path, "arithmetic": arithmetic(), "num_threads": share_of_threads(num_processes)}


def apply_worker_settings(found: Mapping[str, Any]) -> None:
    """Apply the module path and the numeric settings of another process."""
    sys.path[:] = found["path"]
    set_arithmetic(found["arithmetic"], found["num_threads"])


def is_storable(name: str, value: Any) -> bool:
    """Return whether a value can be sent to another process in the format of checkpoints."""
    try:
        encode({name: value})
    except CheckpointError:
        return False
    return True


def describe_error(error: Exception) -> dict[str, Any]:
    """Return an error as plain values, for `rebuild_error`."""
    kind = type(error)
    return {
        "module": kind.__module__,
        "name": kind.__qualname__,
        "message": str(error),
        "args": [it for it in error.args if isinstance(it, (str, int, float))],
        "notes": list(getattr(error, "__notes__", [])),
        "traceback": "".join(traceback.format_exception(error)),
    }


@contextmanager
def saved_error(path: Path, **details: Any) -> Iterator[None]:
    """Write an error of a worker process to a file, for `load_error`, and end the process with exit code 1."""
    try:
        yield
    except Exception as error:
        path.write_text(json.dumps({**describe_error(error), **details}), encoding="utf-8")
        # The caller raises the error, so this process does not print it.
        raise SystemExit(1) from None


def load_error(path: Path) -> dict[str, Any]:
    """Return the error in a file of `saved_error`, for `rebuild_error`."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rebuild_error(described: Mapping[str, Any]) -> Exception:
    """Return the error of a worker process, with its original type if that is built into Python or Dovetail."""
    module, name, message = described["module"], described["name"], described["message"]
    # Only classes of these two modules: no name from a file is imported.
    known = {"builtins": builtins, "dovetail.errors": errors}.get(module)
    kind = vars(known).get(name) if known is not None else None
    error: Exception | None = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        error = _build_error(message, kind, described["args"])
    if error is None:
        error = TrainingProcessError(f"training in a separate process failed: {module}.{name}: {message}")
    for note in (*described["notes"], f"In the training process:\n{described['traceback']}"):
        add_note(error, note)
    return error


def _build_error(message: str, kind: type[Exception], arguments: list[Any]) -> Exception | None:
    """Return an error of a class whose message is the given one; None if the class does not allow this."""
    # KeyError shows the repr of its argument, and UnknownNameError builds its message from several: try both ways.
    for given in (arguments, [message]):
        with suppress(Exception):
            error = kind.__new__(kind, *given)
            if str(error) == message:
                return error
    return None
