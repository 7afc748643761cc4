"""Metrics: weighted means of step outputs, and metrics over a whole pass."""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dovetail.accelerators import to_host, widest_float
from dovetail.data import batch_length, concat
from dovetail.data.batches import slice_batch
from dovetail.errors import ConfigError, DataError
from dovetail.trainers.host_copies import HostCopies
from dovetail.trainers.named_metrics import NamedMetric, Perplexity, metric_by_name

__all__ = [
    "MeanOf",
    "Meter",
    "Metric",
    "WholePass",
    "accuracy",
    "as_metrics",
    "check_classes",
    "compute_metrics",
    "include_means",
    "read_together",
    "validation_names",
]


_NUMBERS = (int, float, np.number, np.bool_)


@runtime_checkable
class Metric(Protocol):
    """A metric over a whole pass, such as the classes of torchmetrics."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add one batch of outputs and targets."""

    def compute(self) -> Any:
        """Return the value over all batches since `reset`."""

    def reset(self) -> None:
        """Forget every batch."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose largest output is the target class.

    Example:
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor(0.5000, dtype=torch.float64)
    """
    # Probabilities of the classes, which cross entropy also accepts as targets.
    if targets.is_floating_point() and targets.shape == outputs.shape:
        targets = targets.argmax(dim=1)
    right = outputs.argmax(dim=1) == targets
    # In double precision if possible, so that the batch size does not change the mean.
    return right.to(widest_float(right.device.type)).mean()


def check_classes(outputs: Any, targets: Any) -> Tensor | None:
    """Return a flag, on the device: True if targets are class numbers for the scores; None if the shapes forbid it.

    Example:
        >>> check_classes(torch.randn(4, 3), torch.tensor([0, 2, 1, 0]))
        tensor(True)
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim < 2 or outputs.shape[1] < 2:
        return None
    if targets.dtype == torch.bool or targets.is_floating_point() or targets.is_complex():
        return None
    if targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return None
    # Cross entropy ignores targets of -100 by default.
    known = (targets == -100) | ((targets >= 0) & (targets < outputs.shape[1]))
    return known.all()


class Meter:
    """Means of the scalars that steps return: the loss weighted by items if a step counts them, the rest by samples.

    `add` only stores detached references, so a pass over the data never waits for the device; `flush` copies them to
    the host in one transfer. Meters add up: the sums of several ranks are the sums over all their samples.

    Example:
        >>> meter = Meter()
        >>> meter.add({"loss": torch.tensor(1.0)}, 3)
        >>> meter.add({"loss": torch.tensor(5.0)}, 1)
        >>> meter.compute()
        {'loss': 2.0}
    """

    __slots__ = ("_pending", "_weighs_by_tensors", "counts", "sums", "values")

    def __init__(self) -> None:
        self._pending: list[tuple[str, Tensor | float, Tensor | float]] = []
        self._weighs_by_tensors = False
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        # Arrays, because a long epoch has many values and each Python float is an object.
        self.values: dict[str, array[float]] = {}

    def __len__(self) -> int:
        """The number of values that are not on the host yet."""
        return len(self._pending)

    def add(self, output: Mapping[str, Any], num_samples: int) -> None:
        """Add the scalars of one batch, and a loss with one element.

        `num_items` is the weight of the loss and `num_tokens` is summed; both are no metrics. Other tensors, such as
        outputs for a single sample, are skipped. A batch of 0 samples has weight zero.
        """
        for name, value in output.items():
            if name == "num_items":
                continue
            weight = num_samples
            if name == "loss" and num_samples and "num_items" in output:
                weight = output["num_items"]
                self._weighs_by_tensors |= isinstance(weight, Tensor)
            if isinstance(value, Tensor):
                if value.ndim == 0:
                    self._pending.append((name, value.detach(), weight))
                elif name == "loss" and value.numel() == 1:
                    self._pending.append((name, value.detach().reshape(()), weight))
            elif isinstance(value, _NUMBERS):
                self._pending.append((name, float(value), weight))

    def flush(self) -> dict[str, list[float]]:
        """Copy the pending values to the host and return them by name."""
        return self._settle(to_host(self._waiting())) if self._pending else {}

    def _waiting(self) -> list[Tensor | float]:
        """Return the pending values, followed by their weights if some of these are tensors: one transfer for both."""
        waiting = [item[1] for item in self._pending]
        return waiting + [item[2] for item in self._pending] if self._weighs_by_tensors else waiting

    def _settle(self, on_host: Sequence[float]) -> dict[str, list[float]]:
        """Add the pending values to the sums, from the numbers of `_waiting`, and return them by name."""
        pending, self._pending, self._weighs_by_tensors = self._pending, [], False
        fresh: dict[str, list[float]] = {}
        has_weights = len(on_host) > len(pending)
        for index, (name, _, given) in enumerate(pending):
            value, weight = on_host[index], on_host[len(pending) + index] if has_weights else float(given)
            fresh.setdefault(name, []).append(value)
            # The number of tokens is a sum, not a mean.
            share = float(weight > 0) if name == "num_tokens" else weight
            self.sums[name] = self.sums.get(name, 0.0) + value * share
            self.counts[name] = self.counts.get(name, 0) + weight
        for name, numbers in fresh.items():
            self.values.setdefault(name, array("d")).extend(numbers)
        return fresh

    def include(self, name: str, mean: Meter) -> None:
        """Add, under a name, the sum and count of another meter with a single value."""
        mean.flush()
        for value, total in mean.sums.items():
            self.sums[name], self.counts[name] = total, mean.counts[value]

    def compute(self) -> dict[str, float]:
        """Return the mean of every name over its samples or items so far, NaN without any; and the sum of tokens."""
        self.flush()
        counts, totals = self.counts, dict(self.sums)
        tokens = {"tokens": totals.pop("num_tokens")} if "num_tokens" in totals else {}
        return {name: it / counts[name] if counts[name] else math.nan for name, it in totals.items()} | tokens

    @property
    def tokens_per_sample(self) -> float:
        """The mean of `num_tokens` over the samples whose batches are on the host; 0 if no step counts tokens."""
        return self.sums["num_tokens"] / self.counts["num_tokens"] if self.counts.get("num_tokens") else 0.0

    def reset(self) -> None:
        """Forget everything."""
        self._pending.clear()
        self.sums.clear()
        self.counts.clear()
        self.values.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return sums, counts and values as plain numbers."""
        self.flush()
        return {
            "sums": dict(self.sums),
            "counts": dict(self.counts),
            "values": {name: list(values) for name, values in self.values.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.reset()
        self.sums.update(state["sums"])
        self.counts.update(state["counts"])
        self.values.update({name: array("d", values) for name, values in state["values"].items()})


def as_metrics(metrics: Any) -> dict[str, Metric]:
    """Return metrics by name from a mapping, a list, or one object, name or callable.

    A name such as `"f1"` is a metric of torchmetrics (`NamedMetric`). A callable `fn(outputs, targets) -> scalar`
    becomes the sample-weighted mean of its values; `WholePass(fn)` is computed once, from the outputs and targets of
    all batches.

    Raises:
        ConfigError: A value is not a metric, two metrics have one name, or a function is known not to be a mean.

    Example:
        >>> list(as_metrics([accuracy]))
        ['accuracy']
    """
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        named: Iterable[tuple[str, Any]] = metrics.items()
    else:
        several = metrics if isinstance(metrics, (list, tuple)) else [metrics]
        named = [(_name(metric), metric) for metric in several]
    by_name: dict[str, Metric] = {}
    for name, metric in named:
        if name in by_name:
            raise _twice(name)
        by_name[name] = _as_metric(metric)
    return by_name


def validation_names(metrics: Mapping[str, Metric], sets: Iterable[str] = ()) -> tuple[str, ...] | None:
    """Return the full names of the numbers that a validation measures; None if they are unknown.

    A name that ends with an underscore is the start of the names of a collection or a vector. If there are several
    data sets, their names come before the names of the metrics.

    Example:
        >>> validation_names(as_metrics({"accuracy": accuracy, "scores": WholePass(lambda outputs, targets: {"a": 1})}))
        ('valid_loss', 'valid_accuracy', 'valid_scores', 'valid_scores_')
    """
    names = ["loss"]
    for name, metric in metrics.items():
        names.append(name)
        if not isinstance(metric, (MeanOf, NamedMetric, Perplexity)):
            if name == _name(metric):
                # Without a name of its own, it may return a dictionary, whose names are known only after a pass.
                return None
            names.append(f"{name}_")
    return tuple(f"valid_{prefix}{name}" for prefix in [f"{each}_" for each in sets] or [""] for name in names)


class MeanOf:
    """The sample-weighted mean of a function of outputs and targets.

    A function that is given as a metric is averaged like this, after a check that it is a mean over samples: its value
    for a batch is compared with its values for the two halves of the batch. `MeanOf(function)`, given by the user,
    skips the check.

    Args:
        function: Returns one number for a batch.
        check: True to raise a `ConfigError` if the function is not a mean over samples.

    Example:
        >>> largest = MeanOf(lambda outputs, targets: outputs.max())
        >>> largest.update(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3))
        >>> largest.update(torch.tensor([7.0]), torch.zeros(1))
        >>> largest.compute()
        4.0
    """

    def __init__(self, function: Callable[[Any, Any], Any], *, check: bool = False) -> None:
        self.function = function
        self._meter = Meter()
        self._checks = check

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch."""
        value = self.function(outputs, targets)
        if not isinstance(value, _NUMBERS) and (not isinstance(value, Tensor) or value.ndim):
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(f"metrics: {_name(self.function)} must return one number for a batch, got {found}")
        num_samples = batch_length(targets)
        # Once per pass, until the halves of a batch have different values: equal values prove nothing.
        if self._checks and num_samples > 1 and not len(self._meter) and not self._meter.counts:
            self._checks = not _is_mean_of_halves(self.function, outputs, targets, value, num_samples)
        self._meter.add({"value": value}, num_samples)
        # Otherwise a long pass would collect the values of all of its batches on the device.
        if len(self._meter) >= 256:
            self._meter.flush()

    def compute(self) -> float:
        """Return the mean so far."""
        return self._meter.compute().get("value", math.nan)

    def reset(self) -> None:
        """Forget every batch."""
        self._meter.reset()

    @property
    def meter(self) -> Meter:
        """The meter with the sums, which add up over ranks."""
        return self._meter


class WholePass:
    """A function of all outputs and targets of a pass, for metrics that are not a mean over samples.

    The outputs and targets of every batch are kept in host memory until the end of the pass. Several processes gather
    them in the order of the batches.

    Args:
        function: Called once, with all outputs and all targets; returns a number, or numbers by name.

    Example:
        >>> spread = WholePass(lambda outputs, targets: (outputs - targets).std())
        >>> spread.update(torch.tensor([1.0, 2.0]), torch.zeros(2))
        >>> spread.update(torch.tensor([3.0]), torch.zeros(1))
        >>> spread.compute()
        tensor(1.)
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        if not callable(function):
            raise ConfigError(f"WholePass: expected a function of outputs and targets, got {function!r}")
        self.function = function
        self._copies = HostCopies()
        self._gathered: list[Any] | None = None

    def update(self, outputs: Any, targets: Any) -> None:
        """Store one batch."""
        self._copies.add((outputs, targets))

    def gather(self, gather: Callable[[list[Any]], list[Any]]) -> None:
        """Add the batches of the other processes, with the trainer's `gather`."""
        self._gathered = gather(self._copies.values())

    def compute(self) -> Any:
        """Return the function of all stored batches; NaN without data."""
        parts = self._copies.values() if self._gathered is None else self._gathered
        if not parts:
            return math.nan
        outputs, targets = (concat(column) for column in zip(*parts, strict=True))
        return self.function(outputs, targets)

    def reset(self) -> None:
        """Forget every batch."""
        self._copies, self._gathered = HostCopies(), None


# Metrics whose value the trainer computes from the batches of all processes.
SYNCHRONISED = (MeanOf, WholePass, NamedMetric, Perplexity)


def _as_metric(metric: Any) -> Metric:
    """Return a metric object, or a function as a mean over samples; raise for functions known not to be one."""
    if isinstance(metric, str):
        return metric_by_name(metric)
    if isinstance(metric, Metric):
        return metric
    if callable(metric):
        function = metric.func if isinstance(metric, partial) else metric
        module, name = str(getattr(function, "__module__", None)), _name(function)
        if module.startswith("sklearn.metrics") and name not in _SKLEARN_MEANS:
            raise ConfigError(f"metrics: {name} of scikit-learn is not a mean over samples; {_NO_MEAN}")
        return MeanOf(metric, check=metric is not accuracy)
    raise ConfigError(
        f"metrics: expected names, functions of outputs and targets, or torchmetrics objects, got {metric!r}"
    )


_NO_MEAN = "give WholePass(function) to compute it over the whole pass, or MeanOf(function) to average it over batches"

# Functions of scikit-learn whose sample-weighted mean over batches is their value for all samples.
_SKLEARN_MEANS = {
    "accuracy_score",
    "brier_score_loss",
    "hamming_loss",
    "log_loss",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_pinball_loss",
    "mean_squared_error",
    "mean_squared_log_error",
    "zero_one_loss",
}


def _is_mean_of_halves(
    function: Callable[[Any, Any], Any], outputs: Any, targets: Any, value: Any, length: int
) -> bool:
    """Return whether a batch shows that a function is a mean over samples; False if the batch shows nothing.

    Raises:
        ConfigError: The function is not a mean over samples.
    """
    middle = length // 2
    try:
        halves = [
            (slice_batch(outputs, start, stop, length), slice_batch(targets, start, stop, length))
            for start, stop in ((0, middle), (middle, length))
        ]
    except DataError:
        # Outputs without one row per sample cannot be split.
        return False
    failure: Exception | None = None
    try:
        with warnings.catch_warnings():
            # A warning about half a batch would confuse: the user never formed it.
            warnings.simplefilter("ignore")
            first, second = (float(function(*half)) for half in halves)
    except Exception as error:
        failure, first, second = error, math.nan, math.nan
    # A failure on half a batch gives NaN. `not … <= …` below is true for NaN, so it counts as a difference.
    whole, mean = float(value), (first * middle + second * (length - middle)) / length
    if not math.isfinite(whole):
        return False
    largest = max(abs(whole), abs(first), abs(second))
    if not abs(whole - mean) <= _tolerance(outputs, value) * largest + 1e-6:
        raise ConfigError(
            f"metrics: {_name(function)} is not a mean over samples: it is {whole:.6g} for a batch, and {first:.6g} "
            f"and {second:.6g} for its halves; {_NO_MEAN}"
        ) from failure
    # Two equal halves fit any function, such as a maximum; the next pass checks again.
    return first != second


def _tolerance(*values: Any) -> float:
    # Half precision has two or three digits.
    is_coarse = any(isinstance(it, Tensor) and it.dtype in (torch.float16, torch.bfloat16) for it in values)
    return 0.02 if is_coarse else 1e-4


def _name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    if isinstance(metric, (MeanOf, WholePass)):
        return _name(metric.function)
    if isinstance(metric, partial):
        return _name(metric.func)
    return getattr(metric, "__name__", None) or type(metric).__name__


def _twice(name: str) -> ConfigError:
    return ConfigError(f"metrics: two numbers are called {name!r}; give metrics by name, {{'one': …, 'other': …}}")


def read_together(metrics: Mapping[str, Metric], meters: Iterable[Meter]) -> None:
    """Copy the pending values of meters and metrics to the host, with one read of the device.

    The copies of the other metrics to the host start before it, so that they have arrived after it.
    """
    for metric in metrics.values():
        if isinstance(metric, NamedMetric):
            metric.start_copy()
    _flush_together([*meters, *(metric.meter for metric in metrics.values() if isinstance(metric, MeanOf))])


def include_means(metrics: Mapping[str, Metric], meter: Meter) -> None:
    """Add the metrics that are means of functions to a meter, whose sums add up over processes."""
    for name, metric in metrics.items():
        if isinstance(metric, MeanOf):
            if name in meter.sums:
                raise _twice(name)
            meter.include(name, metric.meter)


def _flush_together(meters: Sequence[Meter]) -> None:
    """Copy the pending values of all meters to the host in one transfer."""
    waiting = [meter._waiting() for meter in meters]
    on_host = iter(to_host([value for values in waiting for value in values]))
    for meter, values in zip(meters, waiting, strict=True):
        meter._settle(list(islice(on_host, len(values))))


def compute_metrics(metrics: Mapping[str, Metric], means: Mapping[str, float]) -> dict[str, float]:
    """Return means and the value of every metric that is not a mean.

    The numbers of a collection are named `<name>_<part>` if the collection was given by name, else `<part>`; the
    numbers of a tensor are named `<name>_0`, `<name>_1` and so on.

    Raises:
        ConfigError: Two numbers have one name.
    """
    values = dict(means)

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.numel() != 1:
            for index, item in enumerate(value.flatten().tolist()):
                add(f"{name}_{index}", item)
            return
        if name in values:
            raise _twice(name)
        values[name] = float(value)

    for name, metric in metrics.items():
        if isinstance(metric, MeanOf):
            continue
        result = metric.of(means.get("loss", math.nan)) if isinstance(metric, Perplexity) else metric.compute()
        if not isinstance(result, Mapping):
            add(name, result)
            continue
        prefix = "" if name == _name(metric) else f"{name}_"
        for part, value in result.items():
            add(f"{prefix}{part}", value)
    return values
