"""Callback that reduces the learning rate when a metric no longer improves."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from dovetail.callbacks.base import is_new_run
from dovetail.callbacks.monitor import Monitor
from dovetail.errors import ConfigError
from dovetail.history import Mode
from dovetail.units import check_count

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class ReduceOnPlateau(Monitor):
    """Reduce the learning rate of every optimizer when a metric has not improved for some time.

    The rule of `torch.optim.lr_scheduler.ReduceLROnPlateau` is applied after every validation, or at the end of
    every epoch for a metric of training.

    Args:
        monitor: The metric to follow.
        factor: The factor by which the rates are multiplied.
        patience: How many values in a row may be no better before the rates are reduced.
        threshold: How much better a value must be to count as an improvement.
        threshold_mode: Whether `threshold` is relative to the best value (`rel`) or a difference (`abs`).
        cooldown: Number of values to ignore after the rates were reduced.
        min_lr: The lowest rate, one for all parameter groups or one for each.
        eps: A change smaller than this is not made.
        mode: Whether small (`min`) or large (`max`) values are good; None means to use the name.

    Example:
        >>> import torch
        >>> from dovetail.trainers.context import TrainingContext
        >>> context, plateau = TrainingContext(), ReduceOnPlateau(patience=0, factor=0.5)
        >>> context.optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.1)]
        >>> plateau.on_train_start(context)
        >>> for loss in (2.0, 2.0):
        ...     plateau.on_validation_end(context, {"valid_loss": loss})
        >>> context.optimizers[0].param_groups[0]["lr"]
        0.05
    """

    def __init__(
        self,
        monitor: str = "valid_loss",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
        mode: Mode | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        if not 0 < factor < 1:
            raise ConfigError(f"ReduceOnPlateau: factor: expected a number between 0 and 1, got {factor!r}")
        if threshold_mode not in ("rel", "abs"):
            raise ConfigError(f"ReduceOnPlateau: threshold_mode: expected 'rel' or 'abs', got {threshold_mode!r}")
        check_count("ReduceOnPlateau: patience", patience, least=0)
        check_count("ReduceOnPlateau: cooldown", cooldown, least=0)
        self._settings: dict[str, Any] = {
            "mode": self.mode,
            "factor": factor,
            "patience": patience,
            "threshold": threshold,
            "threshold_mode": threshold_mode,
            "cooldown": cooldown,
            "min_lr": min_lr if isinstance(min_lr, (int, float)) else list(min_lr),
            "eps": eps,
        }
        self._schedulers: list[ReduceLROnPlateau] = []
        self._loaded: list[Mapping[str, Any]] | None = None
        # The rates before and after the last reduction, by optimizer and parameter group.
        self._lowered: list[tuple[float, float]] = []
        self._has_warned = False

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        self._lowered, self._has_warned = [], False
        bound = [scheduler.optimizer for scheduler in self._schedulers]
        # A continued run with the same optimizers keeps its counters.
        if self._loaded is None and _same(bound, context.optimizers) and not is_new_run(context):
            return
        states = self._loaded or []
        self._schedulers = [ReduceLROnPlateau(optimizer, **self._settings) for optimizer in context.optimizers]
        for scheduler, state in zip(self._schedulers, states, strict=False):
            # Without the settings, which come from the constructor.
            scheduler.load_state_dict(dict(state))
        self._loaded = None

    def observe(self, context: TrainingContext, value: float) -> None:
        before = self._rates()
        # Before the step, which may lower the rates again.
        self._warn_if_undone(before)
        for scheduler in self._schedulers:
            scheduler.step(value)
        after = self._rates()
        if after != before:
            self._lowered = list(zip(before, after, strict=True))

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for scheduler in self._schedulers for group in scheduler.optimizer.param_groups]

    def _warn_if_undone(self, rates: Sequence[float]) -> None:
        """Warn once if a scheduler has raised a rate that this callback has lowered."""
        # A schedule that computes rates from the initial ones, such as LambdaLR, overwrites a reduction.
        for (before, after), now in zip(self._lowered, rates, strict=False):
            if after < before <= now and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"ReduceOnPlateau has lowered a learning rate from {before:g} to {after:g}, "
                    f"and a scheduler has set it to {now:g} again: use one of the two",
                    UserWarning,
                    stacklevel=2,
                )

    def state_dict(self) -> dict[str, Any]:
        # Restored, but not used yet: schedulers are created when training starts.
        if self._loaded is not None:
            return {"schedulers": self._loaded}
        return {"schedulers": [{name: getattr(scheduler, name) for name in _LEARNED} for scheduler in self._schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`, when training starts."""
        self._loaded = [{name: _LEARNED[name](each[name]) for name in _LEARNED} for each in state["schedulers"]]


# The part of the state of torch's scheduler that is not a setting.
_LEARNED: dict[str, Callable[[Any], float]] = {
    "best": float,
    "num_bad_epochs": operator.index,
    "cooldown_counter": operator.index,
    "last_epoch": operator.index,
}


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))
