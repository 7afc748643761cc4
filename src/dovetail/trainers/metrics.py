"""Means of what steps return, weighted by samples, and metrics over a whole pass."""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dovetail.data import batch_length
from dovetail.errors import ConfigError

__all__ = ["MeanOf", "Meter", "Metric", "accuracy", "as_metrics", "compute_metrics", "warn_of_no_data"]


@runtime_checkable
class Metric(Protocol):
    """A metric over a whole pass, such as those of torchmetrics."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in one batch of outputs and targets."""

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
    if targets.is_floating_point() and targets.shape == outputs.shape:
        targets = targets.argmax(dim=1)
    right = outputs.argmax(dim=1) == targets
    # In double precision, so that it does not matter how samples are batched; one kind of device has none.
    return right.to(torch.float32 if right.device.type == "mps" else torch.float64).mean()


class Meter:
    """Sample-weighted means of the scalars that steps return.

    `add` only keeps detached references, so a pass over the data never waits for the device; `flush` brings them to
    the host in one transfer. Two meters add up: the sums of several ranks are the sums of all their samples.

    Example:
        >>> meter = Meter()
        >>> meter.add({"loss": torch.tensor(1.0)}, 3)
        >>> meter.add({"loss": torch.tensor(5.0)}, 1)
        >>> meter.compute()
        {'loss': 2.0}
    """

    __slots__ = ("_pending", "counts", "sums", "values")

    def __init__(self) -> None:
        self._pending: list[tuple[str, Tensor | float, int]] = []
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.values: dict[str, array[float]] = {}

    def __len__(self) -> int:
        """The number of values that wait to be brought to the host."""
        return len(self._pending)

    def add(self, output: Mapping[str, Any], num_samples: int) -> None:
        """Take in the scalars of one batch; `num_items` is a weight, no metric; what is no scalar is left out."""
        for name, value in output.items():
            if name == "num_items":
                continue
            if isinstance(value, Tensor):
                if value.ndim == 0:
                    self._pending.append((name, value.detach(), num_samples))
            elif isinstance(value, (int, float)):
                self._pending.append((name, value, num_samples))

    def flush(self) -> dict[str, list[float]]:
        """Bring the waiting values to the host and return them by name."""
        pending, self._pending = self._pending, []
        fresh: dict[str, list[float]] = {}
        for (name, _, num_samples), value in zip(pending, _to_host([item[1] for item in pending]), strict=True):
            fresh.setdefault(name, []).append(value)
            self.sums[name] = self.sums.get(name, 0.0) + value * num_samples
            self.counts[name] = self.counts.get(name, 0) + num_samples
        for name, numbers in fresh.items():
            self.values.setdefault(name, array("d")).extend(numbers)
        return fresh

    def include(self, name: str, mean: Meter) -> None:
        """Take in, under a name, what another meter has of its one value."""
        mean.flush()
        for value, total in mean.sums.items():
            self.sums[name], self.counts[name] = total, mean.counts[value]

    def compute(self) -> dict[str, float]:
        """Return the mean of every name over the samples so far; NaN where there was none."""
        self.flush()
        return {name: total / self.counts[name] if self.counts[name] else math.nan for name, total in self.sums.items()}

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
        """Go on from what `state_dict` gave."""
        self.reset()
        self.sums.update(state["sums"])
        self.counts.update(state["counts"])
        self.values.update({name: array("d", values) for name, values in state["values"].items()})


def as_metrics(metrics: Any) -> dict[str, Metric]:
    """Return metrics by name from a mapping, a list, or one object or callable.

    A callable `fn(outputs, targets) -> scalar` becomes the sample-weighted mean of its values.

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
    return {name: _as_metric(metric) for name, metric in named}


class MeanOf:
    """The sample-weighted mean of a function of outputs and targets."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self._meter = Meter()

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in one batch."""
        value = self.function(outputs, targets)
        if not isinstance(value, (int, float)) and (not isinstance(value, Tensor) or value.ndim):
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(f"metrics: {_name(self.function)} must return one number for a batch, got {found}")
        self._meter.add({"value": value}, batch_length(targets))
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
        """The sums, which add up over ranks."""
        return self._meter


def _as_metric(metric: Any) -> Metric:
    if isinstance(metric, Metric):
        return metric
    if callable(metric):
        return MeanOf(metric)
    raise ConfigError(f"metrics: expected functions of outputs and targets, or torchmetrics objects, got {metric!r}")


def _name(metric: Any) -> str:
    return getattr(metric, "__name__", None) or type(metric).__name__


def compute_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the value of every metric that is not a mean, which a meter has; nested results are flattened by name."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        if isinstance(metric, MeanOf):
            continue
        result = metric.compute()
        parts = result.items() if isinstance(result, Mapping) else [(name, result)]
        for part, value in parts:
            if isinstance(value, Tensor) and value.numel() != 1:
                values.update({f"{part}_{index}": float(item) for index, item in enumerate(value.flatten())})
            else:
                values[part] = float(value)
    return values


def warn_of_no_data(stage: str) -> None:
    """Say that a pass saw no data, so that a NaN in its metrics is no riddle."""
    warnings.warn(f"the {stage} data is empty: its metrics are NaN", UserWarning, stacklevel=2)


def _to_host(values: list[Tensor | float]) -> list[float]:
    """Return all values as floats with one transfer for all tensors."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return [float(value) for value in values]
    first = tensors[0]
    if any(tensor.dtype != first.dtype or tensor.device != first.device for tensor in tensors):
        tensors = [tensor.to(first.device, torch.float64) for tensor in tensors]
    numbers = torch.stack(tensors).tolist()
    if len(numbers) == len(values):
        return [float(number) for number in numbers] if not isinstance(numbers[0], float) else numbers
    fetched = iter(numbers)
    return [float(next(fetched)) if isinstance(value, Tensor) else float(value) for value in values]
