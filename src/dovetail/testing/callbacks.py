"""Contract suite of callbacks."""

from __future__ import annotations

from typing import Any, ClassVar

from dovetail.callbacks import Callback, TrainerCallback
from dovetail.testing.contract import EPOCHS, Contract, difference
from dovetail.trainers.reuse import reset


class CallbackContract(Contract):
    """Tests of a `Callback` or `TrainerCallback` that does not stop training within two epochs.

    Attributes:
        changes_training: Whether the callback changes the trained weights on purpose.

    Example:
        >>> from dovetail.callbacks import LRMonitor
        >>> class TestMyCallback(CallbackContract):
        ...     def make(self):
        ...         return LRMonitor()
        >>> TestMyCallback().test_watching_changes_nothing()
    """

    kind = (Callback, TrainerCallback)
    changes_training: ClassVar[bool] = False

    def test_watching_changes_nothing(self) -> None:
        """The callback does not change the trained weights, unless `changes_training` is set."""
        watched = self._trained(self.make())
        # The same seed and data without the callback.
        alone = self._trainer(None)
        self._fit(alone, EPOCHS)
        # The weights only: a callback may add its own metrics to the history.
        is_same = difference(watched.model.state_dict(), alone.model.state_dict(), "the model") is None
        assert is_same or self.changes_training, "training with the callback differs from training without it"

    def test_serves_a_second_run(self) -> None:
        """The same object can be used in a second run of its trainer."""
        trainer = self._trained(self.make())
        # Without this, the second `fit` would only continue the finished run.
        reset(trainer)
        self._fit(trainer, 1)
        assert trainer.context.progress.epoch == 1, f"the second run ended after {trainer.context.progress}"

    def _arguments(self, part: Any) -> dict[str, Any]:
        return {} if part is None else {"callbacks": [part]}
