"""Simulated time: how long clients take, and in which round their answers arrive."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from dovetail.errors import ConfigError, UnknownNameError, expect
from dovetail.federated.backends.base import Done, Outcome
from dovetail.federated.config import ClientsConfig, ServerConfig
from dovetail.federated.messages import Fault, Update
from dovetail.runtime.seeds import derive_seed

__all__ = ["Arrival", "Clock", "Speeds"]

# Seconds that a client takes longer for an epoch, by the numbers that each distribution has.
_DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., float]]] = {
    "normal": (("mean", "sd"), lambda random, mean, sd: random.normal(mean, sd)),
    "pareto": (("alpha",), lambda random, alpha: random.pareto(alpha)),
    "uniform": (("low", "high"), lambda random, low, high: random.uniform(low, high)),
    "zipf": (("s",), lambda random, s: random.zipf(s)),
}
_SLOWEST = 60.0


class Speeds:
    """The simulated speeds of clients. Without a simulation all are equally fast.

    The speed of a client is drawn when it is needed, from its id alone.

    Args:
        config: The settings of clients.
        server: The settings of the server: the bandwidths.

    Raises:
        ConfigError: The distribution lacks a number, has one that it does not know or cannot draw with, or a bandwidth
            is not positive.

    Example:
        >>> Speeds(ClientsConfig(avg_training_time=3.0)).work(client_id=7, epochs=2)
        6.0
    """

    def __init__(self, config: ClientsConfig, server: ServerConfig | None = None) -> None:
        self._config = config
        self._server = server or ServerConfig()
        self._numbers: dict[str, float] = {}
        for name in ("downlink_bandwidth", "uplink_bandwidth"):
            expect(getattr(self._server, name) > 0, name, "a number above 0", getattr(self._server, name))
        if config.speed_simulation:
            self._numbers = _numbers(config.simulation_distribution)
            # One draw finds parameters that numpy rejects, before the first round.
            try:
                self.slowness(1)
            except (ValueError, OverflowError) as error:
                given = dict(config.simulation_distribution)
                raise ConfigError(f"simulation_distribution: {error}, got {given}") from None

    def work(self, client_id: int, epochs: float, share: float = 1.0) -> float:
        """Return the simulated seconds of training; `share` is the number of samples divided by the average."""
        return (self._config.avg_training_time * share + self.slowness(client_id)) * epochs

    def slowness(self, client_id: int) -> float:
        """Return the additional seconds of a client for an epoch, from 0 to 60."""
        if not self._numbers:
            return 0.0
        draw = _DISTRIBUTIONS[self._config.simulation_distribution["distribution"].lower()][1]
        random = np.random.default_rng(derive_seed(self._config.random_seed, "speed", client_id))
        return float(min(max(draw(random, **self._numbers), 0.0), _SLOWEST))

    def transfer(self, down: int, up: int) -> float:
        """Return the simulated seconds for the bytes to a client and back."""
        if not self._config.comm_simulation:
            return 0.0
        # Bandwidths are in megabits per second: 8 bits per byte, and 1e-6 megabits per bit.
        bits = 8e-6
        return down * bits / self._server.downlink_bandwidth + up * bits / self._server.uplink_bandwidth


@dataclass(frozen=True, order=True)
class Arrival:
    """An answer that has not arrived yet.

    Attributes:
        at: The time of its arrival.
        order: The order of selection, for answers that arrive at the same time.
        seconds: The duration of the client's work.
        outcome: The answer or fault.
    """

    at: float
    order: int
    seconds: float = field(compare=False)
    outcome: Outcome = field(compare=False)

    @property
    def client_id(self) -> int:
        """The client."""
        return self._about.client_id

    @property
    def round(self) -> int:
        """The round of its task."""
        return self._about.round

    @property
    def _about(self) -> Update | Fault:
        return self.outcome.update if isinstance(self.outcome, Done) else self.outcome

    def to_plain(self) -> dict[str, Any]:
        """Return the arrival as a dictionary of tensors and plain values; nothing is copied."""
        plain: dict[str, Any] = {"at": self.at, "order": self.order, "seconds": self.seconds}
        if isinstance(self.outcome, Done):
            return {**plain, "update": self.outcome.update.to_plain(), "state": self.outcome.state}
        return {**plain, "fault": vars(self.outcome)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Arrival:
        """Return the value that `to_plain` was called on."""
        is_fault = "fault" in plain
        outcome = Fault(**plain["fault"]) if is_fault else Done(Update(**plain["update"]), plain["state"])
        return cls(plain["at"], plain["order"], plain["seconds"], outcome)


class Clock:
    """The simulated time, and the answers that have not arrived yet.

    Example:
        >>> clock = Clock()
        >>> for client_id, at in [(1, 5.0), (2, 3.0), (3, 9.0)]:
        ...     clock.expect(Arrival(at, client_id, at, Done(Update(client_id, 1, 10), {})))
        >>> first = clock.gather(1, ServerConfig(synchronous=False, minimum_clients_aggregated=2))
        >>> [arrival.client_id for arrival in first], clock.now, clock.busy()
        ([1, 2], 5.0, {3})
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[Arrival] = []

    def busy(self) -> set[int]:
        """Return the ids of the clients whose answers have not arrived yet."""
        return {arrival.client_id for arrival in self._coming}

    def expect(self, arrival: Arrival) -> None:
        """Add an answer that arrives later."""
        heapq.heappush(self._coming, arrival)

    def gather(self, round: int, config: ServerConfig) -> list[Arrival]:
        """Advance the time to the end of a round, and return its answers in the order of selection.

        A synchronous round waits for all. Any other waits for `minimum_clients_aggregated` updates, for tasks that are
        more than `staleness_bound` rounds old, and with `periodic_interval` for the server's next check. All answers
        that have arrived by then are returned.
        """
        taken: list[Arrival] = []
        updates = sum(isinstance(arrival.outcome, Done) for arrival in self._coming)
        # Faults do not count: a round that waits for two updates must not end with two clients that failed.
        wanted = updates if config.synchronous else min(config.minimum_clients_aggregated, updates)

        def take() -> None:
            arrival = heapq.heappop(self._coming)
            self.now = max(self.now, arrival.at)
            taken.append(arrival)

        while self._coming and (
            config.synchronous
            or sum(isinstance(arrival.outcome, Done) for arrival in taken) < wanted
            or any(round - arrival.round > config.staleness_bound for arrival in self._coming)
        ):
            take()
        # The server checks for answers only at multiples of the interval, so the round lasts until the next one.
        if not config.synchronous and config.periodic_interval:
            self.now = math.ceil(self.now / config.periodic_interval) * config.periodic_interval
        while self._coming and self._coming[0].at <= self.now:
            take()
        return sorted(taken, key=lambda arrival: arrival.order)

    def state_dict(self) -> dict[str, Any]:
        """Return the time, and the answers that have not arrived yet."""
        return {"now": self.now, "coming": [arrival.to_plain() for arrival in sorted(self._coming)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.now = float(state["now"])
        # A sorted list is a heap.
        self._coming = [Arrival.from_plain(plain) for plain in state["coming"]]


def _numbers(distribution: Mapping[str, Any]) -> dict[str, float]:
    given = dict(distribution)
    name = str(given.pop("distribution", "")).lower()
    if name not in _DISTRIBUTIONS:
        raise UnknownNameError("distribution of speeds", name, _DISTRIBUTIONS)
    known = _DISTRIBUTIONS[name][0]
    for key, value in given.items():
        if key not in known:
            raise UnknownNameError(f"number of the {name} distribution", key, known)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"simulation_distribution.{key}: expected a number, got {value!r}")
    if missing := [key for key in known if key not in given]:
        raise ConfigError(f"simulation_distribution: the {name} distribution needs {' and '.join(missing)}")
    return cast("dict[str, float]", given)
