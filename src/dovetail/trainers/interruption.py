"""Report and error at the end of a run that a signal stopped."""

from __future__ import annotations

import signal
import sys

from dovetail.runtime.signals import Interrupted
from dovetail.trainers.context import TrainingContext
from dovetail.units import counted


def raise_if_signalled(context: TrainingContext) -> None:
    """Raise `Interrupted` if a signal stopped the run, and print what was saved."""
    number, context.run.signal = context.run.signal, None
    if number is None:
        return
    # One message for all processes.
    if not context.process.is_main:
        raise Interrupted(number)
    progress, saver = context.progress, context.run.saver
    if saver is None:
        saved = "nothing is saved (no checkpoint_dir)"
    elif saver.saved_at != (progress.epoch, progress.batches):
        saved = "nothing is saved (the checkpoint could not be written)"
    else:
        saved = f"the checkpoint is in {saver.directory}, and fit(resume='auto') continues from it"
    place = f"{counted(progress.epoch, 'epoch')} and {counted(progress.batches, 'batch', 'batches')}"
    print(f"interrupted by {signal.Signals(number).name} after {place}: {saved}", file=sys.stderr)
    raise Interrupted(number)
