"""States of metrics by name, which batches update without a read of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED = -100
"""Cross entropy ignores these targets, so the metrics do, too."""

Sums = dict[str, Tensor]


class SummedState(Protocol):
    """Sums over batches from which torchmetrics computes the value."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""

    def sums(self) -> Sums:
        """Return the sums by name: torchmetrics' states, and the number of invalid targets if it is known."""

    def reset(self) -> None:
        """Forget every batch."""


class Counts:
    """Counts of a classification, which replace the `update` of torchmetrics: it selects targets by a mask.

    The size of what a mask selects depends on values, so the host would wait for the device at every batch.

    Args:
        count: Returns the counts of one batch.
    """

    def __init__(self, count: Callable[[Tensor, Tensor], Sums]) -> None:
        self._count = count
        self._sums: Sums = {}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""
        fresh = self._count(outputs, targets)
        self._sums = {name: self._sums[name] + it for name, it in fresh.items()} if self._sums else fresh

    def sums(self) -> Sums:
        """Return the counts by name; empty without a batch."""
        return self._sums

    def reset(self) -> None:
        """Forget every batch."""
        self._sums = {}


class MetricSums:
    """The sums of a metric of torchmetrics whose `update` reads nothing.

    Args:
        metric: The metric, on the device of the outputs.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._is_empty = True

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""
        self._metric.update(outputs, targets)
        self._is_empty = False

    def sums(self) -> Sums:
        """Return the states of the metric; empty without a batch."""
        return {} if self._is_empty else dict(self._metric.metric_state)

    def reset(self) -> None:
        """Forget every batch."""
        self._metric.reset()
        self._is_empty = True


class Curve:
    """The scores and targets of a pass, for metrics of torchmetrics that rank all samples.

    torchmetrics also keeps them until the end, but checks the values of every batch. Here it checks them once.

    Args:
        metric: The metric, on the device of the outputs.
    """

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._parts: list[tuple[Tensor, Tensor]] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch, with one row for each item, because the batches of sequences may differ in length."""
        if outputs.ndim > 1:
            columns = targets.ndim == outputs.ndim
            outputs = outputs.movedim(1, -1).flatten(0, -2)
            targets = targets.movedim(1, -1).flatten(0, -2) if columns else targets.flatten()
        self._parts.append((outputs.detach(), targets))

    def finish(self) -> None:
        """Give all batches to the metric."""
        if self._parts:
            outputs, targets = (torch.cat(column) for column in zip(*self._parts, strict=True))
            self._parts = []
            self._metric.update(outputs, targets)

    def reset(self) -> None:
        """Forget every batch."""
        self._parts = []
        self._metric.reset()


def count_classes(outputs: Tensor, targets: Tensor, top_k: int = 1) -> Sums:
    """Return true and false positives and negatives for each class, and the number of invalid targets.

    Example:
        >>> found = count_classes(torch.eye(3), torch.tensor([0, 2, -100]))
        >>> found["tp"], found["fn"], found["invalid"]
        (tensor([1, 0, 0]), tensor([0, 0, 1]), tensor(0))
    """
    number = outputs.shape[1]
    labels, targets, known, invalid = _class_numbers(outputs, targets, top_k)
    hits = _bins(targets, known & (labels == targets), number)
    wrong_labels, missed = _bins(labels, known, number) - hits, _bins(targets, known, number) - hits
    rest = known.sum() - hits - wrong_labels - missed
    return {"tp": hits, "fp": wrong_labels, "tn": rest, "fn": missed, "invalid": invalid}


def count_right(outputs: Tensor, targets: Tensor) -> Sums:
    """Return the same counts for all classes together; as in torchmetrics, an unknown class counts as missed.

    Example:
        >>> count_right(torch.eye(3), torch.tensor([0, 2, -100]))["tp"]
        tensor(1)
    """
    counted = targets != IGNORED
    right = (counted & (outputs.argmax(dim=1) == targets)).sum()
    wrong = counted.sum() - right
    return {"tp": right, "fp": wrong, "tn": outputs.shape[1] * (right + wrong) - right - 2 * wrong, "fn": wrong}


def count_labels(outputs: Tensor, targets: Tensor) -> Sums:
    """Return true and false positives and negatives of probabilities: for each label, or of a binary task.

    Example:
        >>> count_labels(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, -100]))["tp"]
        tensor(1)
    """
    labels, others = outputs > 0.5, [axis for axis in range(outputs.ndim) if axis != 1]
    are_one, are_zero = targets == 1, targets == 0
    pairs = {
        "tp": labels & are_one,
        "fp": labels & are_zero,
        "tn": ~labels & are_zero,
        "fn": ~labels & are_one,
    }
    invalid = (~are_one & ~are_zero & (targets != IGNORED)).sum()
    return {name: it.sum(dim=others) for name, it in pairs.items()} | {"invalid": invalid}


def count_class_pairs(outputs: Tensor, targets: Tensor) -> Sums:
    """Return the confusion matrix of classes, with one row for each target, and the number of invalid targets.

    Example:
        >>> count_class_pairs(torch.eye(2), torch.tensor([0, 0]))["confmat"]
        tensor([[1, 1],
                [0, 0]])
    """
    number = outputs.shape[1]
    labels, targets, known, invalid = _class_numbers(outputs, targets, 1)
    return {"confmat": _bins(targets * number + labels, known, number**2).reshape(number, number), "invalid": invalid}


def count_label_pairs(outputs: Tensor, targets: Tensor) -> Sums:
    """Return the confusion matrix of a binary task, or one for each label, and the number of invalid targets.

    Example:
        >>> count_label_pairs(torch.tensor([0.9, 0.8]), torch.tensor([1, 0]))["confmat"]
        tensor([[0, 1],
                [0, 1]])
    """
    found = count_labels(outputs, targets)
    rows = [torch.stack([found[one], found[other]], dim=-1) for one, other in (("tn", "fp"), ("fn", "tp"))]
    return {"confmat": torch.stack(rows, dim=-2), "invalid": found["invalid"]}


def _class_numbers(outputs: Tensor, targets: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the predicted classes and the targets, whether a target is a class, and the number of invalid targets.

    Targets that are no classes become class 0, so that they are an index of something.
    """
    labels = outputs.argmax(dim=1)
    if top_k > 1:
        # A target among the largest scores counts as the prediction.
        best = outputs.topk(top_k, dim=1).indices
        labels = torch.where((best == targets.unsqueeze(1)).any(dim=1), targets, best[:, 0])
    labels, targets = labels.flatten(), targets.flatten()
    known = (targets >= 0) & (targets < outputs.shape[1])
    invalid = (~known & (targets != IGNORED)).sum()
    return labels, torch.where(known, targets, 0), known, invalid


def _bins(numbers: Tensor, counted: Tensor, size: int) -> Tensor:
    """Return how often each number occurs. Unlike `torch.bincount`, this reads nothing to find the size."""
    # 32 bits, because some devices cannot add larger integers by index.
    found = torch.zeros(size, dtype=torch.int32, device=numbers.device)
    return found.index_add(0, numbers.long(), counted.int()).long()
