"""Metrics by name: torchmetrics' metrics, whose task and number of classes follow from the first batch."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.accelerators import numbered
from dovetail.data.batches import map_tensors
from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.extras import require
from dovetail.trainers.host_copies import HostCopies
from dovetail.trainers.metric_states import (
    IGNORED,
    Counts,
    Curve,
    MetricSums,
    SummedState,
    count_class_pairs,
    count_classes,
    count_label_pairs,
    count_labels,
    count_right,
)


@dataclass(frozen=True)
class _Kind:
    """A metric of torchmetrics.

    Attributes:
        name: The name after the task: `F1Score` is `MulticlassF1Score`, `BinaryF1Score` and `MultilabelF1Score`. For
            a regression, the whole name.
        arguments: Arguments of every task.
        averaged: True if a metric of several classes takes `average="macro"`.
        is_regression: True if the metric compares numbers, not classes.
        is_curve: True if the metric ranks all samples, so that their scores are kept until the end.
        has_pairs: True if the metric needs how often a class was predicted for each other class.
    """

    name: str
    arguments: Mapping[str, Any] | None = None
    averaged: bool = False
    is_regression: bool = False
    is_curve: bool = False
    has_pairs: bool = False


METRICS: Mapping[str, _Kind] = {
    "accuracy": _Kind("Accuracy", {"average": "micro"}),
    "f1": _Kind("F1Score", averaged=True),
    "precision": _Kind("Precision", averaged=True),
    "recall": _Kind("Recall", averaged=True),
    "auroc": _Kind("AUROC", averaged=True, is_curve=True),
    "average_precision": _Kind("AveragePrecision", averaged=True, is_curve=True),
    "mcc": _Kind("MatthewsCorrCoef", has_pairs=True),
    "top5_accuracy": _Kind("Accuracy", {"average": "micro", "top_k": 5}),
    "mae": _Kind("MeanAbsoluteError", is_regression=True),
    "mse": _Kind("MeanSquaredError", is_regression=True),
    "rmse": _Kind("MeanSquaredError", {"squared": False}, is_regression=True),
    "r2": _Kind("R2Score", is_regression=True),
}
"""The metrics that can be given by name."""


def metric_by_name(name: str) -> NamedMetric | Perplexity:
    """Return the metric of a name.

    Raises:
        UnknownNameError: There is no such metric; the error suggests the nearest name.
    """
    if name == "perplexity":
        return Perplexity()
    if name not in METRICS:
        raise UnknownNameError("metric", name, (*METRICS, "perplexity"))
    return NamedMetric(name)


class NamedMetric:
    """A metric of torchmetrics that is built from the first batch.

    The task follows from outputs and targets: scores `(N, C, …)` with class numbers `(N, …)` are a multiclass task,
    one score per sample with a 0 or 1 is a binary task, and scores and targets of shape `(N, L)` are a multilabel task.
    Scores are logits, as the losses of torch expect them, except after `BCELoss`. Metrics of several classes are macro
    means, except `accuracy` and `top5_accuracy`. Targets of -100 are ignored.

    Batches are counted on their device without a read, and torchmetrics computes the value from these sums on the host.
    Only metrics that rank all samples are computed on the device.

    Args:
        name: A name in the table of the guide, such as `f1`.

    Attributes:
        are_probabilities: True if the outputs of a binary or multilabel task are probabilities, not logits.

    Example:
        >>> metric = NamedMetric("recall")
        >>> metric.update(torch.tensor([[2.0, 1.0], [0.0, 3.0], [4.0, 1.0]]), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.7500)
    """

    def __init__(self, name: str) -> None:
        # Report a missing package now, not after the first epoch.
        require("torchmetrics", "metrics")
        self.__name__ = name
        self.are_probabilities = False
        self._kind = METRICS[name]
        self._shape: list[int] | None = None
        self._metric: Any = None
        self._state: SummedState | Curve | None = None
        self._copies: HostCopies | None = None
        self._has_value = False
        self._device = torch.device("cpu")

    def update(self, outputs: Any, targets: Any) -> None:
        """Add one batch.

        Raises:
            ConfigError: The metric does not fit the shapes of outputs and targets.
        """
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            found = f"{type(outputs).__name__} and {type(targets).__name__}"
            raise ConfigError(f"metrics: {self.__name__!r} needs outputs and targets that are tensors, got {found}")
        # One score per sample is (N,) or (N, 1).
        if outputs.ndim == 2 and outputs.shape[1] == 1 and targets.shape in (outputs.shape, outputs.shape[:1]):
            outputs, targets = outputs.squeeze(1), targets.reshape(-1)
        if self._metric is None:
            self._device = outputs.device
            self._build(self._task(outputs, targets), self._device)
        assert self._shape is not None
        task = self._shape[0]
        if task == _MULTICLASS:
            # Otherwise torchmetrics decides per batch whether scores are logits, and a ranking of samples mixes both.
            outputs = outputs.softmax(dim=1)
        elif task in (_BINARY, _MULTILABEL):
            outputs = outputs if self.are_probabilities else outputs.sigmoid()
            targets = targets.long()
        assert self._state is not None
        self._state.update(outputs, targets)

    def start_copy(self) -> None:
        """Start the copy of the sums to the host. A read of the device that follows also waits for them."""
        if self._state is not None and not isinstance(self._state, Curve):
            self._copies = HostCopies()
            self._copies.add(self._state.sums())

    def gather(self, gather: Callable[[list[Any]], list[Any]]) -> None:
        """Add the batches of the other processes, with the trainer's `gather`."""
        # torchmetrics' own exchange fails if a process had no batch, because that process does not know the classes.
        own = [] if self._metric is None else [{"shape": self._shape, "state": self._own_state()}]
        parts = gather(own)
        if not own and parts:
            self._build(parts[0]["shape"], self._device)
        if len(parts) > len(own):
            self._merge([part["state"] for part in parts])

    def compute(self) -> Any:
        """Return the value over all batches since `reset`; NaN without data.

        Raises:
            DataError: A target is no class.
        """
        if self._metric is None:
            return math.nan
        if not self._has_value:
            own = self._own_state()
            if not isinstance(self._state, Curve):
                self._merge([own])
        with warnings.catch_warnings():
            # The batches may all come from other processes.
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method", category=UserWarning)
            return self._metric.compute()

    def reset(self) -> None:
        """Forget every batch."""
        self._copies, self._has_value = None, False
        if self._metric is not None:
            self._metric.reset()
        if self._state is not None:
            self._state.reset()

    def _own_state(self) -> Any:
        """Return the state of torchmetrics from the batches of this process: sums on the host, or scores."""
        if isinstance(self._state, Curve):
            self._state.finish()
            # Copies of the lists, because `reset` of the metric clears them.
            return {name: list(it) if isinstance(it, list) else it for name, it in self._metric.metric_state.items()}
        if self._copies is None:
            self.start_copy()
        assert self._copies is not None
        return self._copies.values()[0]

    def _merge(self, states: list[Any]) -> None:
        """Make these states the state of the metric."""
        self._has_value = True
        place = self._device if isinstance(self._state, Curve) else torch.device("cpu")
        self._metric.reset()
        invalid = 0
        for state in filter(None, states):
            invalid += int(state.get("invalid", 0))
            self._metric.merge_state(map_tensors(lambda tensor: tensor.to(place), state))
        if invalid:
            assert self._shape is not None
            task, number = self._shape
            known = f"class numbers from 0 to {number - 1}" if task == _MULTICLASS else "0 or 1"
            raise DataError(
                f"metrics: {self.__name__!r} needs targets that are {known}, or {IGNORED} to be ignored; {invalid} "
                "targets are other numbers"
            )

    def prepare(self, criterion: Any, device: torch.device) -> None:
        """Set the device, and derive from the loss whether outputs are probabilities."""
        device = numbered(device)
        if device != self._device:
            # The last run was on another device: the next batch builds the metric again.
            self._shape = self._metric = self._state = None
        self._device = device
        self.are_probabilities = isinstance(criterion, nn.BCELoss) or criterion is nn.functional.binary_cross_entropy

    def _task(self, outputs: Tensor, targets: Tensor) -> list[int]:
        """Return the task and the number of classes or labels."""
        if self._kind.is_regression:
            if outputs.shape == targets.shape:
                return [_REGRESSION, 1]
        elif outputs.ndim == targets.ndim + 1 and not targets.is_floating_point():
            return [_MULTICLASS, outputs.shape[1]]
        elif outputs.shape == targets.shape and bool(((targets == 0) | (targets == 1) | (targets == IGNORED)).all()):
            return [_BINARY, 1] if outputs.ndim == 1 else [_MULTILABEL, outputs.shape[1]]
        accepted = (
            "outputs and targets of one shape"
            if self._kind.is_regression
            else "scores (N, C) with class numbers (N,), or scores with targets of 0 and 1 of the same shape"
        )
        raise ConfigError(
            f"metrics: {self.__name__!r} needs {accepted}, got outputs of shape {tuple(outputs.shape)} and targets of "
            f"shape {tuple(targets.shape)} and type {targets.dtype}"
        )

    def _build(self, shape: list[int], device: torch.device) -> None:
        task, number = shape
        kind, arguments = self._kind, dict(self._kind.arguments or {})
        if arguments.get("top_k", 0) and (task != _MULTICLASS or number <= arguments["top_k"]):
            raise ConfigError(f"metrics: {self.__name__!r} needs scores of more than {arguments['top_k']} classes")
        if task == _REGRESSION:
            metric = getattr(require("torchmetrics.regression", "metrics"), kind.name)(**arguments)
        else:
            if task == _BINARY:
                arguments.pop("average", None)
            elif kind.averaged:
                arguments["average"] = "macro"
            if task != _BINARY:
                arguments["num_classes" if task == _MULTICLASS else "num_labels"] = number
            module = require("torchmetrics.classification", "metrics")
            metric = getattr(module, f"{_PREFIXES[task]}{kind.name}")(ignore_index=IGNORED, **arguments)
        metric.sync_on_compute = False
        self._shape, self._metric = shape, metric
        if kind.is_curve:
            self._state = Curve(metric.to(device))
        elif task == _REGRESSION:
            self._state = MetricSums(metric.clone().to(device))
        else:
            self._state = Counts(_count_for(kind, task, arguments.get("top_k", 1)))


def _count_for(kind: _Kind, task: int, top_k: int) -> Callable[[Tensor, Tensor], dict[str, Tensor]]:
    """Return the function that counts the batches of a classification as its metric of torchmetrics does."""
    if task != _MULTICLASS:
        return count_label_pairs if kind.has_pairs else count_labels
    if kind.has_pairs:
        return count_class_pairs
    if kind.averaged or top_k > 1:
        return partial(count_classes, top_k=top_k)
    return count_right


class Perplexity:
    """The exponential of the mean loss of a pass, which is exact if the steps return the items of their losses.

    The trainer computes it from the loss of all batches and processes. `metrics=["perplexity"]` is this metric by name.

    Example:
        >>> Perplexity().of(0.0)
        1.0
    """

    __name__ = "perplexity"

    def update(self, outputs: Any, targets: Any) -> None:
        """Do nothing: the loss is already a mean over the pass."""

    def compute(self) -> float:
        """Return NaN: only `compute_metrics` has the loss."""
        return math.nan

    def reset(self) -> None:
        """Do nothing: there is no state."""

    def of(self, loss: float) -> float:
        """Return the perplexity of a mean loss; infinity if it is too large for a float."""
        return math.exp(loss) if not loss > _LARGEST_LOSS else math.inf


_LARGEST_LOSS = math.log(sys.float_info.max)

_REGRESSION, _BINARY, _MULTICLASS, _MULTILABEL = range(4)
_PREFIXES = {_BINARY: "Binary", _MULTICLASS: "Multiclass", _MULTILABEL: "Multilabel"}
