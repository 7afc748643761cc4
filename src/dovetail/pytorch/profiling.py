"""Torch profiler for PyTorch trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.callbacks import Callback

if TYPE_CHECKING:
    from dovetail.pytorch.context import PyTorchTrialContext
    from dovetail.trainers.context import TrainingContext


class TorchProfiler(Callback):
    """Runs a torch profiler with the settings of `context.set_profiler`."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context
        self._profiler: Any = None

    def on_train_start(self, context: TrainingContext) -> None:
        from torch.profiler import profile, tensorboard_trace_handler

        assert self._context.profiler_settings is not None
        args, kwargs = self._context.profiler_settings
        # The user's settings come last, so that a handler of the user replaces this one.
        kwargs = {"on_trace_ready": tensorboard_trace_handler(str(self._context.get_tensorboard_path())), **kwargs}
        self._profiler = profile(*args, **kwargs)
        self._profiler.start()

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        self._profiler.step()

    def on_train_end(self, context: TrainingContext) -> None:
        self._stop()

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        # A profiler can be stopped only once, and an error after the end of training calls both hooks.
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
