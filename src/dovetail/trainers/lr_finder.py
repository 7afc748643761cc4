"""Learning-rate finder: a sweep that raises the rate batch by batch until the loss explodes."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from dovetail.callbacks import Callback, Callbacks
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.extras import require
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.preserve_state import own_callbacks, preserve_state
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.units import Batches, counted

__all__ = ["LRFinder", "LogFinder", "find_learning_rate"]

Method = Literal["sobel", "laplace", "min_loss", "max_range"]


class LRFinder:
    """Sweep the learning rate over the training data, and restore the trainer afterwards.

    Weights, optimizer state, rates, counters, history, callbacks and the RNG state are the same afterwards.

    Args:
        trainer: The trainer whose model, loss, optimizer and data are used.
        lr_min: The rate of the first batch.
        lr_max: The rate of the last batch.
        num_epochs: Passes over the data for the whole sweep.
        max_batches: The largest number of batches; 0 means no limit.
        beta: The smoothing factor of the loss; 0 means the plain loss.
        explode_thresh: Stop when the smoothed loss exceeds its best value by this factor.
        lr_select_method: `sobel` chooses the rate at which the loss falls most steeply, `laplace` the rate at which the
            fall slows down most, `min_loss` the rate with the lowest loss, `max_range` the whole falling range.
        lr_min_factor: The returned range starts at the chosen rate divided by this …
        lr_max_scale: … and ends at the chosen rate times this.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> x = torch.randn(256, 4); y = (x.sum(dim=1) > 0).long()
        >>> trainer = Trainer(torch.nn.Linear(4, 2), optim_function="SGD", batch_size=8, verbose=False, seed=0)
        >>> finder = LRFinder(trainer, lr_min=1e-4, lr_max=1e3, num_epochs=2)
        >>> low, high = finder.find((x, y))
        >>> 1e-4 < low < high < 1e3
        True
    """

    def __init__(
        self,
        trainer: SingleProcessTrainer,
        *,
        lr_min: float = 1e-6,
        lr_max: float = 1.0,
        num_epochs: int = 1,
        max_batches: int = 0,
        beta: float = 0.98,
        explode_thresh: float = 4.0,
        lr_select_method: Method = "sobel",
        lr_min_factor: float = 2.0,
        lr_max_scale: float = 1.0,
    ) -> None:
        if not 0 < lr_min < lr_max:
            raise ConfigError(f"LRFinder: expected 0 < lr_min < lr_max, got {lr_min} and {lr_max}")
        if not 0 <= beta < 1:
            raise ConfigError(f"LRFinder: expected a beta of at least 0 and below 1, got {beta}")
        if num_epochs < 1:
            raise ConfigError(f"LRFinder: expected num_epochs of at least 1, got {num_epochs}")
        if lr_select_method not in get_args(Method):
            raise UnknownNameError("lr_select_method", lr_select_method, get_args(Method))
        self.trainer = trainer
        self.lr_min, self.lr_max = lr_min, lr_max
        self.num_epochs, self.max_batches = num_epochs, max_batches
        self.beta, self.explode_thresh = beta, explode_thresh
        self.lr_select_method: Method = lr_select_method
        self.lr_min_factor, self.lr_max_scale = lr_min_factor, lr_max_scale
        self.rates: list[float] = []
        self.losses: list[float] = []

    def find(self, train_data: Any = None) -> tuple[float, float]:
        """Sweep, and return the range of rates to use; `suggestion` is the single chosen rate.

        Args:
            train_data: Training data as for `fit`; None means the data that the trainer already has.
        """
        return self._find(train_data)

    def _find(self, train_data: Any, least_batches: int = 0) -> tuple[float, float]:
        trainer, context = self.trainer, self.trainer.context
        sweep = _Sweep(self)
        if context.model is None:
            raise ConfigError("LRFinder: the trainer has no model: give it one, Trainer(model, …)")
        with preserve_state(trainer, train=train_data):
            # 100 batches per pass for data without a length.
            num_batches = max((trainer.num_batches("train") or 100) * self.num_epochs, least_batches)
            sweep.num_batches = min(num_batches, self.max_batches or num_batches)
            # Schedulers would overwrite the rates of the sweep.
            context.callbacks, context.schedulers = Callbacks([*own_callbacks(context), sweep]), []
            # A period of 0 is never due.
            never = Batches(0)
            trainer.fit(
                max_length=Batches(context.progress.batches + sweep.num_batches),
                validation_period=never,
                checkpoint_period=never,
            )
        self.rates, self.losses = sweep.rates, sweep.losses
        if len(self.rates) < 4:
            after = counted(len(self.rates), "batch", "batches")
            raise ConfigError(f"LRFinder: the loss exploded after {after}: lower lr_min, or make smaller batches")
        low, high = self._falling()
        if self.lr_select_method == "max_range":
            return self.rates[low], self.rates[high] * self.lr_max_scale
        return self.suggestion / self.lr_min_factor, self.suggestion * self.lr_max_scale

    @property
    def suggestion(self) -> float:
        """The rate that `lr_select_method` chooses from the sweep."""
        if not self.rates:
            raise ConfigError("LRFinder: call find() first")
        low, high = self._falling()
        # Over the logarithm, because the sweep multiplies the rate in every batch.
        slope = np.gradient(np.asarray(self.losses[: high + 1]), np.log10(self.rates[: high + 1]))
        if self.lr_select_method in ("min_loss", "max_range"):
            index = high
        elif self.lr_select_method == "laplace":
            index = low + int(np.argmax(np.gradient(slope)[low:]))
        else:
            index = low + int(np.argmin(slope[low:]))
        return self.rates[index]

    def __repr__(self) -> str:
        if not self.rates:
            return "LRFinder(no sweep yet)"
        low, high = (self.rates[index] for index in self._falling())
        batches = counted(len(self.rates), "batch", "batches")
        return f"LRFinder({batches}: suggestion {self.suggestion:.3g}, the loss falls from {low:.3g} to {high:.3g})"

    def _repr_png_(self) -> bytes | None:
        """Return the plot for a notebook; None without a sweep or without matplotlib."""
        if not self.rates or find_spec("matplotlib") is None:
            return None
        image = io.BytesIO()
        self._draw().savefig(image, format="png", dpi=100)
        return image.getvalue()

    def plot(self, path: str | Path) -> Path:
        """Write a plot of the smoothed loss over the rate, with the suggestion, to an image file."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._draw().savefig(target, dpi=150)
        return target

    def _draw(self) -> Any:
        figure = require("matplotlib.figure", "plot").Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, color="#0072B2", linewidth=2)
        axes.axvline(self.suggestion, color="#D55E00", linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="smoothed loss", title="Learning-rate sweep")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        return figure

    def _falling(self) -> tuple[int, int]:
        """Return the part of the sweep in which the loss falls: from the highest point before the minimum to it."""
        losses = np.asarray(self.losses)
        # The first losses are too noisy, because the average contains few values.
        first = len(losses) // 10
        lowest = max(int(np.argmin(losses)), first + 2)
        return first + int(np.argmax(losses[first:lowest])), lowest


LogFinder = LRFinder


def find_learning_rate(
    trainer: SingleProcessTrainer, data: Any = None, *, plot: str | Path | None = None, **settings: Any
) -> float:
    """Return a good learning rate, found by a sweep over the training data; the trainer does not change.

    The sweep multiplies the rate after every batch, until the loss explodes. The result is the rate at which the loss
    falls most steeply, rounded to three digits. `LRFinder` has the whole sweep.

    Args:
        trainer: The trainer whose model, loss, optimizer and data are used.
        data: Training data as for `fit`; None means the data that the trainer already has.
        plot: The image file in which the sweep is drawn; None means no file.
        settings: Arguments of `LRFinder`. By default rates from 1e-6 to 10 are tried, in 100 batches or more.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> x = torch.randn(256, 4); y = (x.sum(dim=1) > 0).long()
        >>> trainer = Trainer(torch.nn.Linear(4, 2), optim_function="SGD", batch_size=8, verbose=False, seed=0)
        >>> trainer.options.learning_rate = find_learning_rate(trainer, (x, y))
        >>> 1e-6 <= trainer.options.learning_rate <= 10
        True
    """
    finder = LRFinder(trainer, **{"lr_max": 10.0, **settings})
    finder._find(data, least_batches=0 if "num_epochs" in settings else _LEAST_BATCHES)
    if plot is not None:
        finder.plot(plot)
    return float(f"{finder.suggestion:.3g}")


# A sweep of fewer batches has too few rates to show where the loss falls.
_LEAST_BATCHES = 100


class _Sweep(Callback):
    """Sets the rate before every batch and records the loss after it."""

    def __init__(self, finder: LRFinder) -> None:
        self._finder = finder
        self._average = 0.0
        self._best = math.inf
        self.num_batches = 0
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        finder = self._finder
        share = len(self.rates) / max(self.num_batches - 1, 1)
        rate = finder.lr_min * (finder.lr_max / finder.lr_min) ** share
        for optimizer in context.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.rates.append(rate)

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        finder = self._finder
        loss = float(output["loss"].detach())
        self._average = finder.beta * self._average + (1 - finder.beta) * loss
        # The bias correction of Adam: the average starts at zero.
        smoothed = self._average / (1 - finder.beta ** len(self.rates))
        if not math.isfinite(smoothed) or smoothed > finder.explode_thresh * self._best:
            # The rate of the exploded batch has no loss, and both lists must have the same length.
            self.rates.pop()
            context.stop("the loss exploded")
            return
        self.losses.append(smoothed)
        self._best = min(self._best, smoothed)
