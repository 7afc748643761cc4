"""Metrics over all processes of a run, reduced by a standard rule or by a user-defined reducer.

A slot is one process of the run. `exchange` is a collective call: it takes the value of this slot and returns the
values of all slots, in the order of the ranks.
"""

from __future__ import annotations

import copy
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.data.batches import map_tensors
from dovetail.errors import ConfigError, DataError, UnknownNameError, add_note
from dovetail.trainers.context import Stage

Exchange = Callable[[Any], list[Any]]


class Reducer(Enum):
    """How the values that `evaluate_batch` returns per batch are reduced to one metric.

    Attributes:
        AVG: The mean over samples: each batch is weighted by its number of samples.
        SUM: The sum over batches.
        MAX: The largest value of any batch.
        MIN: The smallest value of any batch.
    """

    AVG = "avg"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class MetricReducer(ABC):
    """Base class of user-defined metrics over a whole pass and all slots. Give it to `context.wrap_reducer`.

    Training and evaluation steps add values in any way. `reset` is called before each reporting period of training
    and before each validation. At the end every slot calls `per_slot_reduce`, then `cross_slot_reduce` with all values.

    Example:
        >>> class Mean(MetricReducer):
        ...     def reset(self):
        ...         self.total, self.count = 0.0, 0
        ...     def update(self, value):
        ...         self.total, self.count = self.total + value, self.count + 1
        ...     def per_slot_reduce(self):
        ...         return self.total, self.count
        ...     def cross_slot_reduce(self, per_slot_metrics):
        ...         totals, counts = zip(*per_slot_metrics)
        ...         return sum(totals) / sum(counts)
        >>> mean = Mean()
        >>> mean.reset()
        >>> mean.update(3.0)
        >>> mean.cross_slot_reduce([mean.per_slot_reduce(), (9.0, 2)])
        4.0
    """

    @abstractmethod
    def reset(self) -> None:
        """Remove all values."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return the value of this slot: numbers, text, tensors, and lists, tuples and dicts of them."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric, or a dict of metrics if the reducer was wrapped without a name.

        Args:
            per_slot_metrics: The results of `per_slot_reduce` of all slots, in the order of the ranks.
        """


class FunctionReducer(MetricReducer):
    """Collects values and passes the values of all slots to a function, as one flat list.

    If every batch has one value, the list has the same order as in a run with one slot.

    Args:
        function: Takes the list and returns the metric.

    Example:
        >>> largest = FunctionReducer(max)
        >>> largest.update(3)
        >>> largest.update(1)
        >>> largest.cross_slot_reduce([largest.per_slot_reduce(), [7]])
        7
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Add a value. Tensors are detached."""
        # Otherwise the values would keep the graphs of all batches in memory.
        self._values.append(map_tensors(Tensor.detach, value))

    def reset(self) -> None:
        self._values = []

    def per_slot_reduce(self) -> list[Any]:
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        # Slots got the batches in turn, so taking their values in turn restores the order of the batches.
        turns = chain.from_iterable(zip_longest(*per_slot_metrics, fillvalue=_NOTHING))
        return self._function([value for value in turns if value is not _NOTHING])


_NOTHING = object()


class Reducers:
    """The reducers of a trial.

    Example:
        >>> reducers = Reducers()
        >>> largest = reducers.wrap(max, name="largest")
        >>> largest.update(3)
        >>> reducers.reduce("valid", lambda own: [own, [[7]]])
        {'largest': 7}
    """

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a reducer and return it, as `PyTorchTrialContext.wrap_reducer` describes.

        A function is wrapped in an object with the method `update(value)`.
        """
        if not isinstance(reducer, MetricReducer):
            # A class is callable, so a reducer that was not instantiated would be taken for a function.
            if not callable(reducer) or (isinstance(reducer, type) and issubclass(reducer, MetricReducer)):
                raise ConfigError(f"wrap_reducer: expected a MetricReducer or a function of a list, got {reducer!r}")
            reducer = FunctionReducer(reducer)
        for other in self._wrapped:
            # Two reducers may have one name if they are never reported together.
            meets = (for_training and other.for_training) or (for_validation and other.for_validation)
            if meets and name is not None and name == other.name:
                raise ConfigError(f"wrap_reducer: expected a different name for each reducer, got {name!r} twice")
        self._wrapped.append(_Wrapped(reducer, name, for_training, for_validation))
        return reducer

    def reset(self, stage: Stage) -> None:
        """Remove all values from the reducers of a stage."""
        for wrapped in self._of(stage):
            wrapped.reducer.reset()

    def reduce(self, stage: Stage, exchange: Exchange) -> dict[str, Any]:
        """Return the metrics of a stage's reducers over all slots. Every slot must call this."""
        chosen = self._of(stage)
        if not chosen:
            return {}
        # One collective call for all reducers: all processes wrap the same reducers in the same order.
        slots = exchange([wrapped.per_slot_reduce() for wrapped in chosen])
        metrics: dict[str, Any] = {}
        for wrapped, per_slot in zip(chosen, zip(*slots, strict=True), strict=True):
            for name, value in wrapped.cross_slot_reduce(list(per_slot)).items():
                if name in metrics:
                    raise ConfigError(f"expected a different name for each metric, got {name!r} from two reducers")
                metrics[name] = value
        return metrics

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Restore the values of all reducers after a block, even if the block adds values or resets them."""
        kept = [dict(vars(it.reducer)) for it in self._wrapped]
        # The block works on copies, so that afterwards a reducer refers to the same objects as before.
        for it in self._wrapped:
            vars(it.reducer).update(copy.deepcopy(vars(it.reducer)))
        try:
            yield
        finally:
            for it, state in zip(self._wrapped, kept, strict=True):
                # Attributes that the block has added must disappear, too.
                vars(it.reducer).clear()
                vars(it.reducer).update(state)

    def _of(self, stage: Stage) -> list[_Wrapped]:
        return [it for it in self._wrapped if (it.for_training if stage == "train" else it.for_validation)]


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A registered reducer, the name of its metric and its stages."""

    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool

    @property
    def title(self) -> str:
        kind = type(self.reducer).__name__
        return f"the reducer {kind}" if self.name is None else f"the reducer {kind} of {self.name!r}"

    def per_slot_reduce(self) -> Any:
        try:
            return self.reducer.per_slot_reduce()
        except Exception as error:
            add_note(error, f"in per_slot_reduce of {self.title}")
            raise

    def cross_slot_reduce(self, per_slot: list[Any]) -> Mapping[str, Any]:
        try:
            result = self.reducer.cross_slot_reduce(per_slot)
        except Exception as error:
            add_note(error, f"in cross_slot_reduce of {self.title}")
            raise
        if self.name is not None:
            return {self.name: result}
        if not isinstance(result, Mapping):
            raise ConfigError(
                f"{self.title} has no name: expected a dict of metrics from cross_slot_reduce, got {result!r}"
            )
        return result


def reduce_validation(
    batch_metrics: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    how: Reducer | Mapping[str, Reducer],
    exchange: Exchange,
) -> dict[str, float]:
    """Return the metrics of a validation over the batches of all slots. Every slot must call this.

    Args:
        batch_metrics: The output of `evaluate_batch` for each batch of this slot; may be empty.
        sizes: The number of samples in each of these batches. A batch without samples is ignored.
        how: One rule for all metrics, or rules by name; a metric without a rule is averaged.
        exchange: The collective call; it is called once.

    Raises:
        DataError: No slot had a batch, batches have different metrics, or a value is not a scalar.
        ConfigError: `how` is not a rule, or has a rule for an unknown metric.

    Example:
        >>> batches = [{"loss": 1.0, "worst": 1.0}, {"loss": 4.0, "worst": 7.0}]
        >>> reduce_validation(batches, [2, 1], {"worst": Reducer.MAX}, lambda own: [own])
        {'loss': 2.0, 'worst': 7.0}
    """
    rules, default = (how, Reducer.AVG) if isinstance(how, Mapping) else ({}, how)
    for rule in (default, *rules.values()):
        if not isinstance(rule, Reducer):
            raise ConfigError(f"evaluation_reducer: expected AVG, SUM, MAX or MIN of pytorch.Reducer, got {rule!r}")
    columns, weights = _columns(batch_metrics, sizes)
    own = {name: _folded(rules.get(name, default), values, weights) for name, values in columns.items()}
    # A process without validation batches takes part in the exchange, but has no metrics to compare.
    slots = [slot for slot in exchange({"weight": sum(weights), "folded": own}) if slot["weight"]]
    if not slots:
        raise DataError("validation: expected at least one batch with samples, got none")
    known, total = slots[0]["folded"], sum(slot["weight"] for slot in slots)
    for name in rules:
        if name not in known:
            raise UnknownNameError("metric of evaluation_reducer", name, known)
    for slot in slots:
        # Checked after the exchange: an error before it in one process would let all others wait.
        for name in sorted(known.keys() ^ slot["folded"].keys()):
            raise DataError(f"evaluate_batch: the metric {name!r} is there in some processes only")
    metrics = {}
    for name in known:
        rule = rules.get(name, default)
        folded = _fold(rule, torch.tensor([slot["folded"][name] for slot in slots], dtype=torch.float64))
        # The sum over samples was exchanged, so that the mean is exact for processes with unequal numbers of samples.
        metrics[name] = folded / total if rule is Reducer.AVG else folded
    return metrics


def _columns(
    batch_metrics: Sequence[Mapping[str, Any]], sizes: Sequence[int]
) -> tuple[dict[str, list[float]], list[int]]:
    """Return the values of each metric and the number of samples of each batch."""
    columns: dict[str, list[float]] = {}
    weights: list[int] = []
    first = 0
    for number, (metrics, size) in enumerate(zip(batch_metrics, sizes, strict=True)):
        if not isinstance(metrics, Mapping):
            raise DataError(f"evaluate_batch: batch {number}: expected a dict of metrics, got {described(metrics)}")
        if size == 0:
            continue
        if not weights:
            first, columns = number, {name: [] for name in metrics}
        weights.append(size)
        for name in sorted(metrics.keys() ^ columns.keys()):
            has, lacks = (number, first) if name in metrics else (first, number)
            raise DataError(f"evaluate_batch: batch {has} has the metric {name!r}, batch {lacks} has not")
        for name, value in metrics.items():
            scalar = as_scalar(value)
            if scalar is None:
                raise DataError(
                    f"evaluate_batch: the metric {name!r} of batch {number}: expected a number, got {described(value)}"
                )
            columns[name].append(float(scalar.item() if isinstance(scalar, Tensor) else scalar))
    return columns, weights


def _folded(rule: Reducer, values: list[float], weights: list[int]) -> float:
    column = torch.tensor(values, dtype=torch.float64)
    # For a mean, this is the sum over samples, which `reduce_validation` divides by the samples of all processes.
    return _fold(rule, column * torch.tensor(weights) if rule is Reducer.AVG else column)


def _fold(rule: Reducer, column: Tensor) -> float:
    # torch.max and torch.min return NaN if any value is NaN.
    folds = {Reducer.MAX: torch.max, Reducer.MIN: torch.min}
    return float(folds.get(rule, torch.sum)(column))


def as_scalar(value: Any) -> Tensor | float | None:
    """Return a metric as one number; None means that the value is not a single number.

    A tensor is returned as a tensor without dimensions on its device, so that the caller does not wait for the device.

    Example:
        >>> as_scalar(np.float32(0.5)), as_scalar(torch.tensor([3])), as_scalar(torch.ones(2)), as_scalar("text")
        (0.5, tensor(3), None, None)
    """
    if isinstance(value, Tensor):
        # Not `item()`, which would wait for the device in every step.
        return value.reshape(()) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, (np.ndarray, np.generic)):
        number: float | None = value.item() if value.size == 1 and value.dtype.kind in "biuf" else None
        return number
    return value if isinstance(value, (int, float)) else None


def described(value: Any) -> str:
    """Return a short description of a value for an error message."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{'a tensor' if isinstance(value, Tensor) else 'an array'} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"
