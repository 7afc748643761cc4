"""Background writer of checkpoints, which does not block training."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from dovetail.checkpoint.encoding import encode
from dovetail.checkpoint.files import DISK, Files
from dovetail.checkpoint.manifest import summarize
from dovetail.checkpoint.shards import Peers
from dovetail.checkpoint.store import CheckpointWarning, check_on_error, write
from dovetail.errors import CheckpointError


class AsyncWriter:
    """Saves checkpoints in a background thread, one at a time, with the guarantees of `save`.

    The state is copied to host memory before `submit` returns, so training may change it at once. The error of a failed
    write is raised, or with `on_error="warn"` shown as a warning, by the next call of `submit`, `check` or `close`.

    Attributes:
        failed: True if the newest write has failed, and its error was raised or shown.

    Example:
        >>> import tempfile, torch
        >>> from dovetail.checkpoint import load
        >>> weight = torch.ones(2)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with AsyncWriter() as writer:
        ...         writer.submit(f"{directory}/first", {"weight": weight})
        ...         weight.zero_()
        ...     load(f"{directory}/first")
        tensor([0., 0.])
        {'weight': tensor([1., 1.])}
    """

    def __init__(self, *, on_error: Literal["raise", "warn"] = "raise", files: Files = DISK) -> None:
        check_on_error(on_error)
        self._on_error = on_error
        self._files = files
        # One thread, so that two checkpoints are never written at once.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dovetail-checkpoint")
        self._pending: Future[None] | None = None
        self.failed = False

    def submit(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        summary: Mapping[str, Any] | None = None,
        peers: Peers | None = None,
    ) -> None:
        """Copy `state` and start writing it; waits for the previous write.

        Args:
            path: The directory of the checkpoint.
            state: The state.
            summary: As for `save`.
            peers: The processes that hold parts of the state, if there are several. All of them submit in the same
                order. Only the thread may use these connections.

        Raises:
            CheckpointError: The previous write failed (this one is not started), or `state` contains a value that
                cannot be stored.
        """
        self.wait()
        # In the caller's thread: a value that cannot be stored is an error of this call, with its traceback.
        encoded, described = encode(state).copy(), summarize(summary)
        self.failed = False
        self._pending = self._pool.submit(write, Path(path), encoded, described, self._files, peers)

    def check(self) -> None:
        """Raise the error of a failed write; does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the current write and raise its error, if any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointError as error:
            self.failed = True
            if self._on_error == "raise":
                raise
            warnings.warn(CheckpointWarning(str(error)), stacklevel=3)

    def close(self) -> None:
        """Wait for the current write, end the thread, and raise the write's error, if any."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            # The error that ended the block must not be replaced by this one.
            if error is None:
                raise
            warnings.warn(CheckpointWarning(str(failure)), stacklevel=2)
