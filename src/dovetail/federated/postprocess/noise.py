"""Differential privacy of clients: Gaussian noise, and its privacy accounting."""

from __future__ import annotations

import math
import secrets
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import ConfigError, UnknownNameError, expect
from dovetail.extras import require
from dovetail.federated.messages import Update, Weights
from dovetail.federated.postprocess.base import EVERYONE, Gathering, Postprocessor, Upload
from dovetail.federated.postprocess.clipping import clip

_MECHANISMS = ("rdp", "prv")


class PrivacyAccountant:
    """The privacy budget that rounds with Gaussian noise have spent, by opacus's accountants.

    Args:
        mechanism: `"rdp"`, or `"prv"`, which is tighter and slower.

    Example:
        >>> accountant = PrivacyAccountant()
        >>> accountant.step(noise_multiplier=1.0, sample_rate=0.01, num_rounds=100)
        >>> round(accountant.epsilon(delta=1e-5), 2)
        1.21
    """

    def __init__(self, mechanism: Literal["rdp", "prv"] = "rdp") -> None:
        if mechanism not in _MECHANISMS:
            raise UnknownNameError("accountant", str(mechanism), _MECHANISMS)
        self.mechanism = mechanism
        self._history: list[tuple[float, float, int]] = []

    def step(self, noise_multiplier: float, sample_rate: float, num_rounds: int = 1) -> None:
        """Count rounds.

        Args:
            noise_multiplier: The standard deviation of the noise, divided by the largest change by one client.
            sample_rate: The probability with which a client takes part.
            num_rounds: The number of such rounds.
        """
        # The cost of accounting grows with the number of rows, so equal rounds share one.
        if self._history and self._history[-1][:2] == (noise_multiplier, sample_rate):
            num_rounds += self._history.pop()[2]
        self._history.append((noise_multiplier, sample_rate, num_rounds))

    def epsilon(self, delta: float) -> float:
        """Return the epsilon for a probability of failure; infinite if a round had no noise."""
        if not self._history:
            return 0.0
        if any(noise == 0 for noise, _, _ in self._history):
            return math.inf
        accountant = require("opacus.accountants", "privacy").create_accountant(self.mechanism)
        accountant.history = list(self._history)
        with _ignore_warnings():
            # Small bounds can be negative.
            return max(0.0, float(accountant.get_epsilon(delta=delta)))

    def state_dict(self) -> dict[str, Any]:
        """Return the rounds so far."""
        return {"history": [list(row) for row in self._history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self._history = [(float(noise), float(rate), int(rounds)) for noise, rate, rounds in state["history"]]


def find_noise_multiplier(
    epsilon: float, delta: float, sample_rate: float, num_rounds: int, mechanism: Literal["rdp", "prv"] = "rdp"
) -> float:
    """Return the least noise multiplier with which so many rounds spend at most this epsilon.

    Example:
        >>> noise = find_noise_multiplier(epsilon=2.0, delta=1e-5, sample_rate=0.01, num_rounds=100)
        >>> accountant = PrivacyAccountant()
        >>> accountant.step(noise, sample_rate=0.01, num_rounds=100)
        >>> 1.95 < accountant.epsilon(delta=1e-5) <= 2.0
        True
    """
    if mechanism not in _MECHANISMS:
        raise UnknownNameError("accountant", str(mechanism), _MECHANISMS)
    with _ignore_warnings():
        found = require("opacus.accountants.utils", "privacy").get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=sample_rate,
            steps=num_rounds,
            accountant=mechanism,
        )
    return float(found)


class GaussianNoise(Postprocessor):
    """Clips every update to a norm, and adds Gaussian noise: once to the mean, or to every update.

    `"central"`: the server adds it to the weighted mean, so that the model reveals little about a single client.
    `"local"`: every client adds it to its update, so that the update reveals little about the client. Tensors of whole
    numbers are sent as 0, because noise would not hide them.

    Args:
        noise_multiplier: The standard deviation of the noise, divided by `max_norm`.
        max_norm: The largest norm of an update.
        where: `"central"` or `"local"`.
        max_weight: The largest weight of a client in the mean, to which `num_samples` is limited.
        accountant: The accountant of `epsilon`: `"rdp"`, or `"prv"`, which is tighter and slower.
        repeatable: Draw the noise from the task's seed, like all random numbers of a simulation. The noise can be
            removed with that seed; with False it is drawn from the system.

    Example:
        >>> noise = GaussianNoise(noise_multiplier=1.0, max_norm=1.0)
        >>> updates = [Update(k, 1, 1, delta={"w": torch.zeros(3)}) for k in (1, 2)]
        >>> gathering = Gathering(1, [1, 2], {"w": torch.zeros(3)}, num_clients=200, seed=0)
        >>> mean = noise.aggregated({"w": torch.zeros(3)}, updates, gathering)
        >>> round(noise.epsilon(delta=1e-5), 2)
        0.96
    """

    def __init__(
        self,
        noise_multiplier: float = 1.0,
        max_norm: float = 1.0,
        where: Literal["central", "local"] = "central",
        max_weight: int = 1,
        accountant: Literal["rdp", "prv"] = "rdp",
        repeatable: bool = True,
    ) -> None:
        if where not in ("central", "local"):
            raise UnknownNameError("place of the noise", str(where), ("central", "local"))
        expect(noise_multiplier >= 0, "noise_multiplier", "a number that is not negative", noise_multiplier)
        for name, value in (("max_norm", max_norm), ("max_weight", max_weight)):
            expect(value > 0, name, "a number above 0", value)
        self.noise_multiplier = noise_multiplier
        self.max_norm = max_norm
        self.where = where
        self.needs_plain_mean = where == "central"
        self.max_weight = max_weight
        self.repeatable = repeatable
        self._accountant = PrivacyAccountant(accountant)
        self._asked: Counter[int] = Counter()

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of all rounds: of every client, or of the client that was selected most often."""
        if self.where == "central":
            return self._accountant.epsilon(delta)
        if not self._asked:
            return 0.0
        accountant = PrivacyAccountant(self._accountant.mechanism)
        # An observer of single updates knows the selected clients, and can compare two updates of one client, whose
        # difference has up to twice the norm.
        accountant.step(self.noise_multiplier / 2, 1.0, max(self._asked.values()))
        return accountant.epsilon(delta)

    def encode(self, update: Update, upload: Upload) -> Update:
        """Clip the update, limit its weight and add local noise."""
        if update.payload:
            raise ConfigError(
                f"GaussianNoise hides the model's weights only, but the algorithm sends {', '.join(update.payload)} too"
            )
        delta = self._shortened(update)
        if self.where == "local":
            delta = self._noisy(delta, self.noise_multiplier * self.max_norm, upload)
        return replace(update, delta=delta, num_samples=min(update.num_samples, self.max_weight))

    def decode(self, update: Update, gathering: Gathering) -> Update:
        """Clip and limit again before central noise: codecs and dishonest clients can change both."""
        if self.where == "local" or update.client_id == EVERYONE:
            return update
        delta = self._shortened(update)
        return replace(update, delta=delta, num_samples=min(update.num_samples, self.max_weight))

    def aggregated(self, mean: Weights, updates: Sequence[Update], gathering: Gathering) -> Weights:
        """Add central noise, and count the round."""
        if self.where == "local":
            self._asked.update(gathering.cohort)
            return mean
        self._accountant.step(self.noise_multiplier, gathering.sample_rate)
        total = sum(update.num_samples for update in updates)
        if total == 0:
            return mean
        # One client changes the weighted mean by at most max_norm · max_weight / total, the sensitivity.
        return self._noisy(mean, self.noise_multiplier * self.max_norm * self.max_weight / total, gathering)

    def state_dict(self) -> dict[str, Any]:
        asked = {str(client_id): rounds for client_id, rounds in self._asked.items()}
        return {"accountant": self._accountant.state_dict(), "asked": asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accountant.load_state_dict(state["accountant"])
        self._asked = Counter({int(client_id): rounds for client_id, rounds in state["asked"].items()})

    def _shortened(self, update: Update) -> dict[str, Tensor]:
        hidden = {
            name: value if value.is_floating_point() else torch.zeros_like(value)
            for name, value in update.delta.items()
        }
        return clip(hidden, self.max_norm)[0]

    def _noisy(self, weights: Weights, deviation: float, source: Upload | Gathering) -> dict[str, Tensor]:
        generator = source.generator() if self.repeatable else torch.Generator().manual_seed(secrets.randbits(63))
        return {
            name: value + deviation * torch.randn(value.shape, generator=generator).to(value)
            if value.is_floating_point()
            else value
            for name, value in weights.items()
        }


@contextmanager
def _ignore_warnings() -> Iterator[None]:
    """Ignore warnings about orders of the Rényi divergence and about logarithms of 0."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield
