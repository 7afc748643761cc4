"""Base class of callbacks that follow one metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dovetail.callbacks.base import Callback
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.history import Mode, mode_of

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class Monitor(Callback, ABC):
    """Passes every new value of one metric to `observe`.

    A metric of validation (`valid_…`) is read after each validation, any other metric at the end of each epoch. If the
    metric does not exist, an error is raised before training, or, if a `test_step` of the user computes the metrics,
    the first time that it is read.

    Args:
        monitor: The name of the metric.
        mode: Whether small (`min`) or large (`max`) values are good; None means to use the name.
    """

    def __init__(self, monitor: str, mode: Mode | None = None) -> None:
        if mode not in (None, "min", "max"):
            raise ConfigError(f"{type(self).__name__}: mode: expected 'min', 'max' or None, got {mode!r}")
        self.monitor = monitor
        self.mode: Mode = mode_of(monitor) if mode is None else mode

    @abstractmethod
    def observe(self, context: TrainingContext, value: float) -> None:
        """Receive the newest value."""

    def on_train_start(self, context: TrainingContext) -> None:
        """Raise if a metric of validation is monitored that this run does not measure."""
        if self._of_validation and context.run.plan is not None and context.run.plan.validate is None:
            raise ConfigError(
                f"{type(self).__name__} monitors {self.monitor!r}, but this run validates nothing: "
                "pass validation data, or monitor a metric of training such as 'train_loss'"
            )
        names = context.run.validation_names
        if self._of_validation and names is not None and not self._is_among(names):
            # Otherwise the error would come after the first epoch, which may take hours.
            raise UnknownNameError(f"metric for {type(self).__name__} to monitor", self.monitor, names)

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        if self._of_validation:
            self.observe(context, self._pick(metrics))

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        if not self._of_validation:
            self.observe(context, self._pick(metrics))

    @property
    def _of_validation(self) -> bool:
        return self.monitor.startswith("valid_")

    def _is_among(self, names: tuple[str, ...]) -> bool:
        return self.monitor in names or self.monitor.startswith(tuple(name for name in names if name.endswith("_")))

    def _pick(self, metrics: Mapping[str, float]) -> float:
        try:
            return metrics[self.monitor]
        # A metric that never appears would otherwise be a callback without effect.
        except KeyError:
            raise UnknownNameError(f"metric for {type(self).__name__} to monitor", self.monitor, metrics) from None

    def _gain(self, value: float, reference: float) -> float:
        """Return how much better a value is than another; NaN if they cannot be compared."""
        return reference - value if self.mode == "min" else value - reference
