"""Results of methods that plato awaits, which a subclass may define with or without `async`."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any


def completed(result: Any) -> Any:
    """Return the result of a coroutine; return any other value unchanged.

    Example:
        >>> async def later():
        ...     return 3
        >>> completed(later()), completed(3)
        (3, 3)
    """
    if not inspect.iscoroutine(result):
        return result
    loop = None
    # Raised if no loop runs, which is the usual case outside of notebooks.
    with suppress(RuntimeError):
        loop = asyncio.get_running_loop()
    if loop is None:
        return asyncio.run(result)
    # A notebook already runs a loop, and a thread has at most one.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, result).result()
