"""Local training with differential privacy: the trainer of clients whose settings have `dp_epsilon`."""

from __future__ import annotations

import secrets
from typing import Any

from dovetail.history import History
from dovetail.trainers.capabilities import DifferentialPrivacy
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import DefaultDataLoaderStrategy

_Private: Any = ComposableTrainer.add_on(DifferentialPrivacy)


class PrivateClientTrainer(_Private):  # type: ignore[misc]
    """A trainer that trains one client after the other with differential privacy, and spends epsilon in every run.

    Batches are drawn at random, each sample independently. Epsilon counts one run. A client that takes part in
    several rounds spends more, at most the sum.

    Args:
        epsilon: The epsilon that a run spends.
        delta: The probability that epsilon does not hold. None means one over the client's samples.
        max_grad_norm: The largest norm of the gradient of one sample.
        options: Further arguments of `ComposableTrainer`.
    """

    def __init__(self, epsilon: float, delta: float | None = None, max_grad_norm: float = 1.0, **options: Any) -> None:
        super().__init__(
            target_epsilon=epsilon,
            delta=delta,
            max_grad_norm=max_grad_norm,
            poisson_sampling=True,
            data_loader_strategy=DefaultDataLoaderStrategy(shuffle=True),
            **options,
        )

    def fit(self, *args: Any, **kwargs: Any) -> History:
        """Train one client with new noise and a new account."""
        # The size of the noise depends on the number of samples. A new seed prevents equal noise for two clients.
        self.noise_multiplier, self._accountant.history = None, []
        self._seed, self._generator = secrets.randbits(63), None
        history: History = super().fit(*args, **kwargs)
        return history
