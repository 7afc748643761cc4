"""Stochastic weight averaging: the mean of the weights at the end of training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dovetail.callbacks.base import is_new_run
from dovetail.callbacks.ema import WeightAverage
from dovetail.errors import ConfigError
from dovetail.units import Epochs, TrainUnit, Updates, check_count, check_finite

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class SWA(WeightAverage):
    """Average the weights of the last part of training, as `torch.optim.swa_utils` does.

    When training ends, the average replaces the weights of the model, and one pass over the training data in training
    mode updates the statistics of batch norm layers (`update_bn` of torch). Validations and checkpoints before that are
    of the training weights, so that a resumed run and a later `fit` continue exactly.

    In several processes, each process updates the statistics with its own batches, and the result is the one of the
    first process.

    Args:
        start: When the average starts: a part of the planned length, or `Epochs(n)` or `Updates(n)`.
        lr: The learning rate of this part, which is reached gradually (`SWALR` of torch); None changes no rate.
        every: How often the weights are averaged: `Epochs(n)`, or `Updates(n)`.
        anneal: The number of averages after which the rate is `lr`.
        anneal_strategy: How the rate gets there: `cos` or `linear`.

    Example:
        >>> import torch
        >>> from dovetail import Trainer
        >>> x, y = torch.randn(32, 4), torch.zeros(32).long()
        >>> swa = SWA(start=0.5, lr=0.05)
        >>> trainer = Trainer(torch.nn.Linear(4, 2), "cpu", callbacks=[swa], verbose=False)
        >>> _ = trainer.fit((x, y), max_length=Epochs(4))
        >>> swa.num_averaged
        2
    """

    def __init__(
        self,
        start: float | TrainUnit = 0.75,
        lr: float | None = None,
        every: TrainUnit = Epochs(1),  # noqa: B008 - a unit is immutable
        anneal: int = 10,
        anneal_strategy: Literal["cos", "linear"] = "cos",
    ) -> None:
        super().__init__()
        if not isinstance(start, TrainUnit):
            check_finite("SWA: start", start)
            if not 0 <= start < 1:
                raise ConfigError(f"SWA: start: expected a part from 0 to 1 or Epochs(n), got {start!r}")
        for name, unit in (("start", start), ("every", every)):
            if isinstance(unit, TrainUnit) and not isinstance(unit, (Epochs, Updates)):
                raise ConfigError(f"SWA: {name}: expected Epochs(n) or Updates(n), got {unit!r}")
        if not isinstance(every, TrainUnit) or every.length < 1:
            raise ConfigError(f"SWA: every: expected Epochs(n) or Updates(n), got {every!r}")
        if lr is not None and not lr > 0:
            raise ConfigError(f"SWA: lr: expected a positive number or None, got {lr!r}")
        check_count("SWA: anneal", anneal, least=0)
        if anneal_strategy not in ("cos", "linear"):
            raise ConfigError(f"SWA: anneal_strategy: expected 'cos' or 'linear', got {anneal_strategy!r}")
        self.start = start
        self.lr = lr
        self.every = every
        self.anneal = anneal
        self.anneal_strategy = anneal_strategy
        # The rates at the start of the average, by optimizer and group.
        self._rates: list[list[float]] = []
        # Parameters and buffers of training, while the average is in the model.
        self._before: dict[str, Tensor] | None = None

    def on_train_start(self, context: TrainingContext) -> None:
        before, self._before = self._before, None
        if before is not None and not is_new_run(context):
            # The average is in the model since the last `fit` ended: training continues from its own weights.
            assert context.model is not None
            with torch.no_grad():
                for name, tensor in _tensors(context.model).items():
                    tensor.copy_(before[name])
        super().on_train_start(context)
        if not self.num_averaged:
            self._rates = []

    def on_update(self, context: TrainingContext) -> None:
        if isinstance(self.every, Updates):
            self._average_if_due(context)
        elif self.num_averaged:
            # A schedule that steps with updates has just set its own rate.
            self._set_rates(context)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        """Average the weights, after the schedule of the epoch has set its rate."""
        if isinstance(self.every, Epochs):
            self._average_if_due(context)
        elif self.num_averaged:
            self._set_rates(context)

    def on_train_end(self, context: TrainingContext) -> None:
        """Put the average in the model, and update the statistics of its batch norm layers."""
        if not self.num_averaged:
            if context.run.stop_reason is None:
                warnings.warn(
                    f"SWA: no weights were averaged: training ended before start={self.start!r}, every={self.every!r}",
                    UserWarning,
                    stacklevel=2,
                )
            return
        assert context.model is not None
        self._before = {name: tensor.detach().clone() for name, tensor in _tensors(context.model).items()}
        self._show_average()
        self._training_weights = None
        assert context.run.trainer is not None
        norms = [module for module in context.model.modules() if isinstance(module, _BatchNorm)]
        if norms:
            with _collecting(context.model, norms):
                context.run.trainer.evaluate(stage="train")

    def _average_if_due(self, context: TrainingContext) -> None:
        count = self.every.count(context.progress)
        first = self._first(context)
        if count > first and (count - first) % self.every.length == 0:
            if not self._rates:
                self._rates = [[group["lr"] for group in each.param_groups] for each in context.optimizers]
            # The first average is a copy of the weights.
            self._blend(1 / (self.num_averaged + 1))
        if self.num_averaged:
            self._set_rates(context)

    def _first(self, context: TrainingContext) -> int:
        """Return the start of the average, in the unit of `every`."""
        assert context.run.plan is not None
        planned = context.run.plan.max_length
        start = self.start if isinstance(self.start, TrainUnit) else type(planned)(int(self.start * planned.length))
        if type(start) is type(self.every):
            return start.length
        raise ConfigError(
            f"SWA: every={self.every!r} and start={self.start!r} of {planned!r} have different units; give both in "
            "Epochs or both in Updates"
        )

    def _set_rates(self, context: TrainingContext) -> None:
        if self.lr is None:
            return
        part = 1.0 if not self.anneal else min(1.0, self.num_averaged / self.anneal)
        alpha = part if self.anneal_strategy == "linear" else (1 - math.cos(math.pi * part)) / 2
        for optimizer, rates in zip(context.optimizers, self._rates, strict=True):
            _write_rates(optimizer, [self.lr * alpha + rate * (1 - alpha) for rate in rates])

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rates": [list(rates) for rates in self._rates],
            "before": None if self._before is None else dict(self._before),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rates = [[float(rate) for rate in rates] for rates in state["rates"]]
        before = state["before"]
        self._before = None if before is None else {name: value.detach().clone() for name, value in before.items()}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _write_rates(optimizer: Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@contextmanager
def _collecting(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Make batch norm layers average the statistics of a pass, from the start and with equal weights."""
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    # An evaluation sets evaluation mode, and restores all modes afterwards.
    hook = model.register_forward_pre_hook(lambda module, inputs: module.train() and None)
    try:
        yield
    finally:
        hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
