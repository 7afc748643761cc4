"""Messages between server and clients: tasks, updates, faults and weighted sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

# The keys of payloads: an update has the additions of `customize_report`, and a task has the result of
# `customize_server_response`.
REPORT, SERVER_RESPONSE = "report", "server_response"
# Whole payloads of servers and clients that were written for plato, if they are more than the model's weights.
SERVER_PAYLOAD, CLIENT_PAYLOAD = "server_payload", "client_payload"
# The state of a model, or the difference of two states, by name.
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Task:
    """The task of one client in one round. Tasks of a round share `weights`, so that a backend transfers them once.

    Attributes:
        round: The round, counted from 1.
        client_id: The client, counted from 1.
        weights: The global model, without the layers that stay with clients.
        seed: The seed of all random numbers of the task: order of the data, dropout, noise.
        kind: Train and send an update; or evaluate the model on the client's test data; or train for the client alone,
            after all rounds, and evaluate the result.
        payload: Data that the algorithm sends with the weights.
        config: The settings of the client's trainer in this round: `epochs`, `batch_size` and others.
    """

    round: int
    client_id: int
    weights: Weights
    seed: int = 0
    kind: Literal["train", "evaluate", "personalize"] = "train"
    payload: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are sent."""
        return num_bytes(self.weights) + num_bytes(self.payload)


@dataclass(frozen=True)
class Update:
    """The answer of a client.

    Attributes:
        client_id: The client.
        round: The round of its task.
        num_samples: The training samples of the client, by which the update is weighted.
        num_updates: The number of optimizer steps: SCAFFOLD's K, FedNova's τ.
        delta: The trained weights less the received ones, by name.
        payload: Data that the algorithm sends with the weights.
        metrics: The metrics of the client: `loss`, and `accuracy` if it tested.
        seconds: The duration of the work, for information only.
        staleness: The rounds from sending the task to receiving the update; set by the server.
        sent: The weights that the client received; set by the server, no client sends them back.
    """

    client_id: int
    round: int
    num_samples: int
    num_updates: int = 0
    delta: Weights = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    staleness: int = 0
    sent: Weights = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are sent."""
        return num_bytes(self.delta) + num_bytes(self.payload)

    @property
    def report(self) -> SimpleNamespace:
        """Plato's report of a client, with the additions of its `customize_report`.

        Example:
            >>> Update(3, 1, num_samples=10, payload={"report": {"valuation": 0.5}}).report.valuation
            0.5
        """
        return SimpleNamespace(
            client_id=self.client_id,
            num_samples=self.num_samples,
            accuracy=self.metrics.get("test_accuracy", 0),
            training_time=self.seconds,
            comm_time=0.0,
            processing_time=0.0,
            update_response=False,
            **self.payload.get(REPORT, {}),
        )

    def with_report(self, report: SimpleNamespace) -> Update:
        """Return the update with the samples, the accuracy and the additions of a report."""
        # The names that every report has; all others are additions of the user.
        before = vars(replace(self, payload={}).report)
        added = {name: value for name, value in vars(report).items() if name not in before}
        metrics = dict(self.metrics)
        if report.accuracy != before["accuracy"]:
            metrics["test_accuracy"] = report.accuracy
        return replace(
            self,
            num_samples=report.num_samples,
            metrics=metrics,
            payload={**self.payload, REPORT: added} if added else self.payload,
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the update as a dictionary of tensors and plain values; nothing is copied."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in found.items()}

    def weighted(self, weight: float | None = None) -> WeightedSum:
        """Return the update as a sum of one, weighted by its samples unless a weight is given."""
        weight = float(self.num_samples) if weight is None else weight
        return WeightedSum(weight, {name: _real(value) * weight for name, value in self.delta.items()})

    def with_delta(self, delta: Weights) -> Update:
        """Return the same update with another difference."""
        return replace(self, delta=delta)


@dataclass(frozen=True)
class Fault:
    """The reason why a client is left out of a round.

    Attributes:
        client_id: The client.
        round: The round of the task.
        kind: An error of the client, no answer in time, an invalid update, or one update too many.
        reason: One sentence.
    """

    client_id: int
    round: int
    kind: Literal["crashed", "timed out", "not finite", "wrong shape", "duplicate", "late"]
    reason: str

    @property
    def sentence(self) -> str:
        """The client, the kind and the reason in one sentence that names the client once.

        Example:
            >>> Fault(3, 1, "crashed", "ValueError: no").sentence
            'client 3 crashed: ValueError: no'
        """
        who = f"client {self.client_id}"
        reason = self.reason.removeprefix(f"{who}: ")
        if reason.startswith(f"{who} "):
            reason = f"it{reason.removeprefix(who)}"
        return f"{who} {self.kind}: {reason}"


@dataclass(frozen=True)
class WeightedSum:
    """Weighted sums of updates, which can be added in any grouping: clients, edge servers, processes.

    Attributes:
        weight: The sum of the weights.
        sums: The weighted sums of the differences, by name; whole numbers are summed as float64.

    Example:
        >>> ups = [Update(k, 1, n, delta={"w": torch.tensor([v])}) for k, n, v in [(1, 1, 4.0), (2, 3, 8.0)]]
        >>> WeightedSum.of(ups).mean()
        {'w': tensor([7.])}
    """

    weight: float
    sums: dict[str, Tensor]

    @classmethod
    def of(cls, updates: Iterable[Update]) -> WeightedSum:
        """Return the sum of updates weighted by samples, added in their order."""
        weight, sums = 0.0, dict[str, Tensor]()
        for update in updates:
            weight += update.num_samples
            for name, value in update.delta.items():
                # In place, because allocating every term takes longer than adding it.
                if name in sums:
                    sums[name].add_(_real(value), alpha=update.num_samples)
                else:
                    sums[name] = _real(value) * float(update.num_samples)
        return cls(weight, sums)

    def __add__(self, other: WeightedSum) -> WeightedSum:
        sums = dict(self.sums)
        for name, value in other.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        return WeightedSum(self.weight + other.weight, sums)

    def mean(self) -> dict[str, Tensor]:
        """Return the weighted mean; zeros if all weights are 0."""
        if self.weight == 0:
            return {name: torch.zeros_like(value) for name, value in self.sums.items()}
        return {name: value / self.weight for name, value in self.sums.items()}


def num_bytes(content: Any) -> int:
    """Return the bytes of all tensors, arrays and byte strings in nested containers, and 8 for every number."""
    if isinstance(content, Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, np.ndarray):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(num_bytes(value) for value in content.values())
    if isinstance(content, (list, tuple)):
        return sum(num_bytes(value) for value in content)
    if isinstance(content, (bytes, str)):
        return len(content)
    own = getattr(content, "num_bytes", None)
    return int(own) if own is not None else 8


def _real(value: Tensor) -> Tensor:
    return value if value.is_floating_point() or value.is_complex() else value.double()
