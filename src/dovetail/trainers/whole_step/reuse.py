"""Search for the compiled code of a step: in this process, on disk, then by a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.trainers.whole_step.sharing import Code, find_shared, settings_of_torch, share
from dovetail.trainers.whole_step.stored import load_code, store_code
from dovetail.trainers.whole_step.tracing import Backend


def reuse_code(described: Any, backend: Backend, make: Callable[[], Code]) -> Code:
    """Return the code of a step or an update, from an earlier trace if there is one.

    Args:
        described: All inputs of the trace; None if they are unknown.
        backend: Only compiled code is stored on disk.
        make: Traces and compiles.
    """
    key = None if described is None else (described, backend, settings_of_torch())
    found = find_shared(key)
    if found is not None:
        return found
    is_compiled = backend == "inductor"
    code = load_code(key) if is_compiled else None
    if code is None:
        code = make()
        if is_compiled:
            store_code(key, code)
    share(key, code)
    return code
