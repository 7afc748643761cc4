"""FedBuff: buffered asynchronous aggregation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from dovetail.errors import expect
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, Weights


class FedBuff(Algorithm):
    """w ← w + η (1/K) Σ s(τ_k) Δ_k over the K updates in the buffer (Nguyen et al., 2022).

    The server has the buffer: it must be asynchronous, and K is its `minimum_clients_aggregated`. All updates have the
    same weight.

    Args:
        server_learning_rate: η.
        scale_stale_updates: Use s(τ) = 1 / √(1 + τ) for an update of staleness τ, as in the paper's experiments. If
            False, s(τ) is 1.

    Example:
        >>> import torch
        >>> from dovetail.federated.averaging import weighted_mean
        >>> updates = [Update(k, 1, n, delta={"w": torch.tensor(v)}) for k, n, v in [(1, 1, 2.0), (2, 99, 4.0)]]
        >>> FedBuff().aggregate({"w": torch.tensor(0.0)}, updates, weighted_mean)
        {'w': tensor(3.)}
    """

    def __init__(self, server_learning_rate: float = 1.0, scale_stale_updates: bool = False) -> None:
        expect(server_learning_rate > 0, "server_learning_rate", "a number above 0", server_learning_rate)
        self.server_learning_rate = server_learning_rate
        self.scale_stale_updates = scale_stale_updates

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        # With one sample each, `average` is the plain mean (1/K) Σ of the paper.
        buffer = [replace(update, num_samples=1, delta=self._scaled(update)) for update in updates]
        return moved(weights, average(buffer), self.server_learning_rate)

    def _scaled(self, update: Update) -> Weights:
        if not self.scale_stale_updates or not update.staleness:
            return update.delta
        scale = 1 / math.sqrt(1 + update.staleness)
        return {name: value * scale for name, value in update.delta.items()}
