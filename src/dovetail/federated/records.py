"""What a round has brought."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dovetail.federated.messages import Fault, Update

__all__ = ["ClientsEvaluation", "RoundRecord", "Spread", "accuracy_of_clients", "client_metrics"]


@dataclass(frozen=True)
class Spread:
    """How a number differs from client to client.

    Attributes:
        mean: Every client counted once.
        deviation: The standard deviation.
        worst: The mean of the worst tenth, at least one client.

    Example:
        >>> Spread.of([0.5, 0.75, 1.0])
        Spread(mean=0.75, deviation=0.2041241452319315, worst=0.5)
    """

    mean: float
    deviation: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float], *, larger_is_better: bool = True) -> Spread:
        """Return the spread of some values, of which there is at least one."""
        ordered = sorted(values, reverse=not larger_is_better)
        worst = ordered[: max(1, math.ceil(len(ordered) / 10))]
        return cls(statistics.fmean(values), statistics.pstdev(values), statistics.fmean(worst))


@dataclass(frozen=True)
class RoundRecord:
    """One round, as the server saw it.

    Attributes:
        round: The round, counted from 1.
        elapsed_time: Seconds since the first round began: simulated ones, where time is.
        selected: Who was asked.
        reported: Whose updates were used.
        faults: Who was left out, and why; of edge servers also whom they have left out.
        metrics: `accuracy` and `loss` of the global model, `train_loss` of the clients, and what else was measured.
        bytes_down: What was sent to clients.
        bytes_up: What was sent by clients.
        staleness: The largest one of an update that was used.
        backend: The backend that trained the clients of this round; `sequential` if `vectorized` was requested and
            could not train them at once. Empty in records from before there was this field.
    """

    round: int
    elapsed_time: float
    selected: tuple[int, ...]
    reported: tuple[int, ...]
    faults: tuple[Fault, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    staleness: int = 0
    backend: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return the record as lists, dictionaries and numbers."""
        # Not `asdict`, which copies every id: a checkpoint has all rounds, each with all its clients.
        faults = tuple(asdict(fault) for fault in self.faults)
        return {**vars(self), "faults": faults, "metrics": dict(self.metrics)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RoundRecord:
        """Take back what `to_plain` gave."""
        changed = {
            "selected": tuple(plain["selected"]),
            "reported": tuple(plain["reported"]),
            "faults": tuple(Fault(**fault) for fault in plain["faults"]),
        }
        return cls(**{**plain, **changed})


@dataclass(frozen=True)
class ClientsEvaluation:
    """How good a model is for each client.

    Attributes:
        metrics: Of each client that has test data, by its id.
        num_samples: Training samples of each of them, by its id.
        faults: Who could not be asked, and why.

    Example:
        >>> found = ClientsEvaluation({1: {"accuracy": 0.5}, 2: {"accuracy": 1.0}}, {1: 10, 2: 30})
        >>> found.mean("accuracy"), found.spread("accuracy").worst
        (0.875, 0.5)
    """

    metrics: Mapping[int, Mapping[str, float]]
    num_samples: Mapping[int, int]
    faults: tuple[Fault, ...] = ()

    def spread(self, name: str) -> Spread:
        """Return how a metric differs from client to client; of a loss, the largest are the worst."""
        return Spread.of([each[name] for each in self.metrics.values()], larger_is_better="loss" not in name)

    def to_plain(self) -> dict[str, Any]:
        """Return the evaluation as lists, dictionaries with words as keys, and numbers."""
        return {
            "metrics": {str(client_id): dict(each) for client_id, each in self.metrics.items()},
            "num_samples": {str(client_id): number for client_id, number in self.num_samples.items()},
            "faults": [asdict(fault) for fault in self.faults],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ClientsEvaluation:
        """Take back what `to_plain` gave."""
        return cls(
            {int(client_id): each for client_id, each in plain["metrics"].items()},
            {int(client_id): number for client_id, number in plain["num_samples"].items()},
            tuple(Fault(**fault) for fault in plain["faults"]),
        )

    def mean(self, name: str) -> float:
        """Return the mean of a metric, each client counted by its samples."""
        return _mean([(self.num_samples[client_id], each[name]) for client_id, each in self.metrics.items()])


def client_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return what clients measured: the training loss by samples, and the mean and the spread of what they tested."""
    found: dict[str, float] = {}
    trained = [(it.num_samples, it.metrics["loss"]) for it in updates if "loss" in it.metrics]
    if trained:
        found["train_loss"] = _mean(trained)
    tested = [update for update in updates if "test_accuracy" in update.metrics]
    if tested:
        spread = Spread.of([update.metrics["test_accuracy"] for update in tested])
        found |= {
            "clients_accuracy": spread.mean,
            "clients_accuracy_std": spread.deviation,
            "clients_accuracy_worst": spread.worst,
        }
    return found


def accuracy_of_clients(updates: Sequence[Update]) -> dict[str, float]:
    """Return the accuracy that clients measured, each counted by its samples, where a server can measure none."""
    tested = [(it.num_samples, it.metrics["test_accuracy"]) for it in updates if "test_accuracy" in it.metrics]
    return {"accuracy": _mean(tested)} if tested else {}


def _mean(weighted: Sequence[tuple[int, float]]) -> float:
    """Return the weighted mean; the plain one where all weights are 0."""
    total = sum(weight for weight, _ in weighted)
    if not total:
        return statistics.fmean(value for _, value in weighted)
    return sum(weight * value for weight, value in weighted) / total
