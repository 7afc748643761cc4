"""Callbacks that stop training when a metric no longer improves or is good enough."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dovetail.callbacks.base import is_new_run
from dovetail.callbacks.monitor import Monitor
from dovetail.errors import ConfigError
from dovetail.history import Mode
from dovetail.units import check_count, check_finite

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class _Stopper(Monitor):
    """Stops training when `verdict`, a function of its state, returns a reason."""

    def on_train_start(self, context: TrainingContext) -> None:
        """Reset the state for a new run; stop a resumed run at once if it had already stopped."""
        super().on_train_start(context)
        if is_new_run(context):
            self._forget()
        self._stop_if_due(context)

    def observe(self, context: TrainingContext, value: float) -> None:
        """Receive a value, and stop training if the verdict is reached."""
        self._take(context, value)
        self._stop_if_due(context)

    def on_train_end(self, context: TrainingContext) -> None:
        """Reset the counters, so that the next `fit` of the same trainer can continue."""
        if self._verdict() is not None:
            self._forget()

    @abstractmethod
    def _take(self, context: TrainingContext, value: float) -> None: ...

    @abstractmethod
    def _verdict(self) -> str | None: ...

    @abstractmethod
    def _forget(self) -> None: ...

    def _stop_if_due(self, context: TrainingContext) -> None:
        reason = self._verdict()
        if reason is not None:
            context.stop(reason)


class EarlyStopping(_Stopper):
    """Stop when a metric has not improved for some time.

    It counts values: validations, or epochs for a metric of training. A NaN is not an improvement.

    Args:
        monitor: The metric to follow.
        patience: Stop after this number of values in a row without an improvement.
        min_delta: A value must be better than the best one by more than this.
        mode: Whether small (`min`) or large (`max`) values are good; None means to use the name.
        restore_best: Whether to restore the best weights when training ends, except after an error. The weights are
            those in the model when the callback is called: list it before `EMA` to restore the validated average.

    Attributes:
        best: The best value so far, or None.
        best_epoch: The epoch of this value, counted from 1, or None.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> stopping, context = EarlyStopping(patience=2), TrainingContext()
        >>> for loss in (3.0, 2.0, 2.5, 2.2):
        ...     context.progress.epoch += 1
        ...     stopping.on_validation_end(context, {"valid_loss": loss})
        >>> context.run.stop_reason
        'valid_loss has not improved 2 times in a row (best: 2 in epoch 2)'
    """

    def __init__(
        self,
        monitor: str = "valid_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode | None = None,
        restore_best: bool = False,
    ) -> None:
        super().__init__(monitor, mode)
        check_count("EarlyStopping: patience", patience)
        # `not … >= 0` also rejects NaN.
        if not min_delta >= 0:
            raise ConfigError(f"EarlyStopping: min_delta: expected a number that is not negative, got {min_delta!r}")
        self.patience = patience
        self.min_delta = min_delta
        self.restore_best = restore_best
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._num_worse = 0
        self._weights: dict[str, Any] | None = None

    def on_train_start(self, context: TrainingContext) -> None:
        if is_new_run(context):
            # Not in `_forget`, which is also called at the end of a `fit` that stopped: the best value then stays.
            self.best = self.best_epoch = self._weights = None
        super().on_train_start(context)

    def on_train_end(self, context: TrainingContext) -> None:
        super().on_train_end(context)
        if self.restore_best and self._weights is not None:
            assert context.model is not None
            context.model.load_state_dict(self._weights)

    def _take(self, context: TrainingContext, value: float) -> None:
        """Compare a value with the best one, and store the weights of a new best value if they are to be restored."""
        # The first value is the best one, unless it is NaN. A later NaN has a gain of NaN, which exceeds no limit.
        is_better = value == value if self.best is None else self._gain(value, self.best) > self.min_delta
        if not is_better:
            self._num_worse += 1
            return
        self._num_worse = 0
        self.best = value
        # At the end of an epoch the progress already counts it; inside of an epoch it does not.
        self.best_epoch = context.progress.epoch + (context.progress.batch > 0)
        if self.restore_best:
            assert context.model is not None
            self._weights = _copies(context.model.state_dict())

    def _verdict(self) -> str | None:
        if self._num_worse < self.patience:
            return None
        best = "no best value" if self.best is None else f"best: {self.best:.4g} in epoch {self.best_epoch}"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        row = "" if self._num_worse == 1 else f" {self._num_worse} times in a row"
        return f"{self.monitor} has not improved{by}{row} ({best})"

    def _forget(self) -> None:
        self._num_worse = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "num_worse": self._num_worse,
            "weights": self._weights,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best = state["best"]
        self.best, self.best_epoch = None if best is None else float(best), state["best_epoch"]
        self._num_worse = int(state["num_worse"])
        self._weights = None if state["weights"] is None else _copies(state["weights"])


class StopWhen(_Stopper):
    """Stop as soon as a metric is good enough.

    Args:
        monitor: The metric to follow.
        threshold: The value that is good enough, inclusive.
        mode: Whether small (`min`) or large (`max`) values are good; None means to use the name.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> context = TrainingContext()
        >>> StopWhen("valid_accuracy", 0.9).on_validation_end(context, {"valid_accuracy": 0.95})
        >>> context.run.stop_reason
        'valid_accuracy is 0.95 (required: 0.9)'
    """

    def __init__(self, monitor: str, threshold: float, mode: Mode | None = None) -> None:
        super().__init__(monitor, mode)
        check_finite("StopWhen: threshold", threshold)
        self.threshold = threshold
        self._value: float | None = None

    def _take(self, context: TrainingContext, value: float) -> None:
        self._value = value

    def _verdict(self) -> str | None:
        # `not … >= 0`, because NaN is not good enough.
        if self._value is None or not self._gain(self._value, self.threshold) >= 0:
            return None
        return f"{self.monitor} is {self._value:.4g} (required: {self.threshold:.4g})"

    def _forget(self) -> None:
        self._value = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        value = state["value"]
        self._value = None if value is None else float(value)


class ImprovementWindow(_Stopper):
    """Stop when a metric has improved too little over the last epochs.

    It compares the newest value with the one `num_epochs` values ago, so it needs `num_epochs + 1` values.

    Args:
        num_epochs: The length of the window.
        improv: The gain over the window below which training stops: the increase of a metric whose large values are
            good, the decrease of a loss.
        monitor: The metric to follow.
        mode: Whether small (`min`) or large (`max`) values are good; None means to use the name.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> window, context = ImprovementWindow(num_epochs=3, improv=0.01), TrainingContext()
        >>> for accuracy in (0.1, 0.2, 0.3, 0.3, 0.3, 0.3):
        ...     assert context.run.stop_reason is None
        ...     window.on_validation_end(context, {"valid_accuracy": accuracy})
        >>> context.run.stop_reason
        'valid_accuracy has gained 0 over the last 3 values (required: 0.01)'
    """

    def __init__(
        self, num_epochs: int, improv: float, monitor: str = "valid_accuracy", mode: Mode | None = None
    ) -> None:
        super().__init__(monitor, mode)
        check_count("ImprovementWindow: num_epochs", num_epochs)
        check_finite("ImprovementWindow: improv", improv)
        self.num_epochs = num_epochs
        self.improv = improv
        # One more than the window, because the newest value is compared with the one before the window.
        self._values: deque[float] = deque(maxlen=num_epochs + 1)

    def _take(self, context: TrainingContext, value: float) -> None:
        self._values.append(value)

    def _verdict(self) -> str | None:
        if len(self._values) <= self.num_epochs:
            return None
        gain = self._gain(self._values[-1], self._values[0])
        # Written so that NaN, which is not a gain, stops training, too.
        if gain >= self.improv:
            return None
        return (
            f"{self.monitor} has gained {gain:.4g} over the last {self.num_epochs} values (required: {self.improv:.4g})"
        )

    def _forget(self) -> None:
        self._values.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = deque(map(float, state["values"]), maxlen=self.num_epochs + 1)


def _copies(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of weights, which later training does not change."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in weights.items()
    }
