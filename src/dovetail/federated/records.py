"""Records of rounds and of evaluations by clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dovetail.federated.messages import Fault, Update


@dataclass(frozen=True)
class Spread:
    """The spread of a metric over clients.

    Attributes:
        mean: The mean, every client with the same weight.
        deviation: The standard deviation.
        worst: The mean over the worst tenth, at least one client.

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
    """The record of one round.

    Attributes:
        round: The round, counted from 1.
        elapsed_time: Seconds since the start of the first round, or simulated seconds.
        selected: The clients that were selected.
        reported: The clients whose updates were used.
        faults: The clients that were left out, with the reasons; also those that edge servers have left out.
        metrics: `accuracy` and `loss` of the global model, `train_loss` of the clients, and others.
        bytes_down: The bytes that were sent to clients.
        bytes_up: The bytes that clients sent.
        staleness: The largest staleness of an update that was used.
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
        """Return the value that `to_plain` was called on."""
        changed = {
            "selected": tuple(plain["selected"]),
            "reported": tuple(plain["reported"]),
            "faults": tuple(Fault(**fault) for fault in plain["faults"]),
        }
        return cls(**{**plain, **changed})


@dataclass(frozen=True)
class ClientsEvaluation:
    """The metrics of a model at each client.

    Attributes:
        metrics: The metrics of each client with test data, by its id.
        num_samples: The training samples of each of them, by its id.
        faults: The clients that failed, with the reasons.

    Example:
        >>> found = ClientsEvaluation({1: {"accuracy": 0.5}, 2: {"accuracy": 1.0}}, {1: 10, 2: 30})
        >>> found.mean("accuracy"), found.spread("accuracy").worst
        (0.875, 0.5)
    """

    metrics: Mapping[int, Mapping[str, float]]
    num_samples: Mapping[int, int]
    faults: tuple[Fault, ...] = ()

    def spread(self, name: str) -> Spread:
        """Return the spread of a metric; the worst losses are the largest."""
        return Spread.of([each[name] for each in self.metrics.values()], larger_is_better="loss" not in name)

    def to_plain(self) -> dict[str, Any]:
        """Return the evaluation as lists, numbers, and dictionaries with strings as keys, as JSON needs them."""
        return {
            "metrics": {str(client_id): dict(each) for client_id, each in self.metrics.items()},
            "num_samples": {str(client_id): number for client_id, number in self.num_samples.items()},
            "faults": [asdict(fault) for fault in self.faults],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ClientsEvaluation:
        """Return the value that `to_plain` was called on."""
        return cls(
            {int(client_id): each for client_id, each in plain["metrics"].items()},
            {int(client_id): number for client_id, number in plain["num_samples"].items()},
            tuple(Fault(**fault) for fault in plain["faults"]),
        )

    def mean(self, name: str) -> float:
        """Return the mean of a metric, each client counted by its samples."""
        return _mean([(self.num_samples[client_id], each[name]) for client_id, each in self.metrics.items()])


def client_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Return the training loss by samples, and the mean and the spread of the test accuracy of clients."""
    found: dict[str, float] = {}
    trained = [(it.num_samples, it.metrics["loss"]) for it in updates if "loss" in it.metrics]
    if trained:
        found["train_loss"] = _mean(trained)
    tested = [update for update in updates if "test_accuracy" in update.metrics]
    if tested:
        spread = Spread.of([update.metrics["test_accuracy"] for update in tested])
        # By client, not by samples: these describe fairness among clients.
        found |= {
            "clients_accuracy": spread.mean,
            "clients_accuracy_std": spread.deviation,
            "clients_accuracy_worst": spread.worst,
        }
    return found


def accuracy_of_clients(updates: Sequence[Update]) -> dict[str, float]:
    """Return the mean test accuracy of clients by samples, for a server without test data."""
    tested = [(it.num_samples, it.metrics["test_accuracy"]) for it in updates if "test_accuracy" in it.metrics]
    return {"accuracy": _mean(tested)} if tested else {}


def _mean(weighted: Sequence[tuple[int, float]]) -> float:
    """Return the weighted mean; the plain one if all weights are 0."""
    total = sum(weight for weight, _ in weighted)
    if not total:
        return statistics.fmean(value for _, value in weighted)
    return sum(weight * value for weight, value in weighted) / total
