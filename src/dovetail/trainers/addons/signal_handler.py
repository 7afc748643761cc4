"""Add-on that writes a checkpoint and a log line when a signal stops training."""

from __future__ import annotations

import signal
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dovetail.runtime.signals import Interrupted
from dovetail.trainers.addons.core import AddOnBase
from dovetail.units import counted


class SignalHandlerAddon(AddOnBase):
    """On SIGINT or SIGTERM, writes a checkpoint and a line in a log before the program exits.

    Every trainer stops on these signals, and saves if it has a `checkpoint_dir`; this add-on sets other paths.

    Args:
        signal_save_path: The path of the checkpoint.
        signal_log_path: A text file that receives one line per interruption; None means no log.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(SignalHandlerAddon)(signal_save_path="interrupted")
        >>> trainer.signal_save_path
        PosixPath('interrupted')
    """

    def __init__(
        self, *args: Any, signal_save_path: str | Path, signal_log_path: str | Path | None = None, **kwargs: Any
    ) -> None:
        self.signal_save_path = Path(signal_save_path)
        self.signal_log_path = None if signal_log_path is None else Path(signal_log_path)
        super().__init__(*args, **kwargs)

    def teardown(self, error: BaseException | None) -> None:
        """Write the checkpoint and the log line if a signal ended the run."""
        try:
            # A second signal ends the program immediately, without a checkpoint.
            if isinstance(error, Interrupted) and not error.at_once:
                self.save_checkpoint(self.signal_save_path)
                self._log_signal(error.number)
        finally:
            super().teardown(error)

    def _log_signal(self, number: int) -> None:
        if self.signal_log_path is None or not self.context.process.is_main:
            return
        now, name = datetime.now(timezone.utc).isoformat(timespec="seconds"), signal.Signals(number).name
        progress = self.context.progress
        place = f"{counted(progress.epoch, 'epoch')} and {counted(progress.batches, 'batch', 'batches')}"
        self.signal_log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.signal_log_path.open("a", encoding="utf-8") as log:
            log.write(f"{now} {name} after {place}: saved to {self.signal_save_path}\n")
