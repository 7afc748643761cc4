"""Selection of the clients of a round: random, in turn, by loss (AFL) or by utility (Oort)."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dovetail.errors import expect
from dovetail.federated.messages import Update
from dovetail.registry import Registry
from dovetail.runtime.seeds import derive_seed

__all__ = ["AFLSelection", "ClientSelection", "OortSelection", "RandomSelection", "RoundRobinSelection", "selections"]


@dataclass(eq=False, repr=False)
class ClientSelection(ABC):
    """Selects the clients of a round, and may learn from their reports.

    Args:
        seed: The seed of all its random numbers.
    """

    seed: int = 0

    @abstractmethod
    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        """Return the ids of up to `count` different clients, in the order in which they are asked.

        Args:
            round: The round, counted from 1.
            clients: The ids of all clients, usually a `range`. There may be millions, so do not iterate over them.
            count: The number of clients to select.
            busy: The clients that still work for an earlier round.
        """

    def observe(  # noqa: B027 - most learn nothing
        self, round: int, updates: Sequence[Update], seconds: Mapping[int, float]
    ) -> None:
        """Receive the reports of a round.

        Args:
            round: The round, counted from 1.
            updates: The updates that were used.
            seconds: The simulated seconds that each client took.
        """

    def generator(self, round: int) -> random.Random:
        """Return the generator of a round, which depends on the seed and the round only."""
        return random.Random(derive_seed(self.seed, "selection", round))

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most learn nothing
        """Restore the state returned by `state_dict`."""


class RandomSelection(ClientSelection):
    """Selects every client with the same probability, in a time that does not depend on their number.

    Example:
        >>> RandomSelection(seed=1).select(1, range(1, 1_000_001), count=3)
        [972909, 633258, 27567]
    """

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        return _drawn(self.generator(round), clients, count, busy)


class RoundRobinSelection(ClientSelection):
    """Selects clients in turn, from the first to the last and again; busy clients are skipped.

    Example:
        >>> selection = RoundRobinSelection()
        >>> selection.select(1, range(1, 6), count=3), selection.select(2, range(1, 6), count=3)
        ([1, 2, 3], [4, 5, 1])
    """

    _next = 0

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        taken = set(busy)
        chosen: list[int] = []
        # At most this many positions can be needed; the loop also ends if all clients are busy.
        for _ in range(min(len(clients), count + len(taken))):
            if len(chosen) == count:
                break
            client_id = clients[self._next % len(clients)]
            self._next = (self._next + 1) % len(clients)
            if client_id not in taken:
                chosen.append(client_id)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])


@dataclass(eq=False, repr=False)
class AFLSelection(ClientSelection):
    """Active federated learning: selects clients with a high loss more often (Goetz et al., 2019).

    The value of a client is its mean loss times the root of the number of its samples. The share `alpha1` of clients
    with the lowest values has no weight, the others exp(alpha2 · value). The share `alpha3` of a round is drawn evenly
    from all clients, so that new clients are selected, too.

    Example:
        >>> selection = AFLSelection(alpha1=0.5, alpha2=10.0, alpha3=0.0)
        >>> reports = [Update(k, 1, 100, metrics={"loss": k / 10}) for k in range(1, 11)]
        >>> selection.observe(1, reports, {})
        >>> sorted(selection.select(2, range(1, 1001), count=2))
        [9, 10]
    """

    alpha1: float = 0.75
    alpha2: float = 0.01
    alpha3: float = 0.1
    _worth: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in ("alpha1", "alpha3"):
            share = getattr(self, name)
            expect(0 <= share <= 1, name, "a share from 0 to 1", share)

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        generator = self.generator(round)
        worth = {client_id: worth for client_id, worth in self._worth.items() if client_id not in busy}
        ordered = sorted(worth, key=lambda client_id: (worth[client_id], client_id))
        ignored = set(ordered[: math.floor(self.alpha1 * len(ordered))])
        top = max(worth.values(), default=0.0)
        # Only proportions matter. Without the largest exponent, no exponential overflows.
        chances = {
            client_id: (0.0 if client_id in ignored else math.exp(self.alpha2 * (value - top)))
            # Every known client keeps a small chance, also one with a weight of 0; scaled like the other
            # exponentials.
            + 0.01 * math.exp(-min(self.alpha2 * top, 700.0))
            for client_id, value in worth.items()
        }
        chosen = _by_chance(generator, chances, min(math.floor((1 - self.alpha3) * count), count))
        return chosen + _drawn(generator, clients, count - len(chosen), {*busy, *chosen})

    def observe(self, round: int, updates: Sequence[Update], seconds: Mapping[int, float]) -> None:
        for update in updates:
            if _has_loss(update):
                self._worth[update.client_id] = update.metrics["loss"] * math.sqrt(update.num_samples)

    def state_dict(self) -> dict[str, Any]:
        return {"clients": torch.tensor(list(self._worth)), "worth": _column(self._worth.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._worth = dict(zip(state["clients"].tolist(), state["worth"].tolist(), strict=True))


@dataclass(eq=False, repr=False)
class OortSelection(ClientSelection):
    """Oort: selects clients with a high utility for the time that they take (Lai et al., 2021).

    The utility of a client is its samples times its loss, plus a term that grows while it is not selected. A client
    that takes longer than the preferred duration has its utility multiplied by (duration / preferred)^-penalty. The
    pacer increases that duration when rounds gain less than those before. A decreasing share of every round goes to
    new clients. The loss is the mean training loss; the paper uses the root mean square over samples.

    Args:
        seed: The seed of all its random numbers.
        exploration: The share of new clients in the first round.
        exploration_decay: The factor of that share from round to round.
        min_exploration: The smallest share.
        penalty: The exponent for slow clients.
        cutoff: Clients are drawn if their utility is at least this share of the utility of the last ranked one.
        step_window: The number of rounds that the pacer compares.
        pacer_step: The simulated seconds that the pacer adds.
        blacklist_rounds: The most rounds for which a client is selected. None means no limit.

    Example:
        >>> selection = OortSelection(exploration=0.0, min_exploration=0.0)
        >>> reports = [Update(k, 1, 100, metrics={"loss": 1.0 if k < 9 else 9.0}) for k in range(1, 11)]
        >>> selection.observe(1, reports, {})
        >>> sorted(selection.select(2, range(1, 1001), count=2))
        [9, 10]
    """

    exploration: float = 0.9
    exploration_decay: float = 0.98
    min_exploration: float = 0.2
    penalty: float = 2.0
    cutoff: float = 0.95
    step_window: int = 20
    pacer_step: float = 10.0
    blacklist_rounds: int | None = 10
    # By client: its utility, the round of its last report, its duration, and how often it was selected.
    _known: dict[int, tuple[float, int, float, int]] = field(default_factory=dict, init=False)
    _gains: list[float] = field(default_factory=list, init=False)
    _preferred: float = field(default=0.0, init=False)

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        generator = self.generator(round)
        usable = {
            client_id: self._use(client_id, round)
            for client_id, (_, _, _, asked) in self._known.items()
            if client_id not in busy and (self.blacklist_rounds is None or asked < self.blacklist_rounds)
        }
        share = max(self.min_exploration, self.exploration * self.exploration_decay ** (round - 1))
        # Exploration: a rounded share of the round goes to clients without a report; exploitation takes the rest.
        unseen = len(clients) - len(self._known)
        wanted = max(count - min(math.floor(share * count + 0.5), unseen), 0)
        ranked = sorted(usable.values(), reverse=True)
        # Draw by chance among all clients that are nearly as good as the last one of a strict ranking.
        if len(ranked) > wanted > 0:
            limit = self.cutoff * ranked[wanted - 1]
            usable = {client_id: use for client_id, use in usable.items() if use >= limit}
        chosen = _by_chance(generator, usable, wanted)
        chosen += _drawn(generator, clients, count - len(chosen), {*busy, *chosen, *self._known})
        # If too few are left, select clients again that have reached the limit.
        return chosen + _drawn(generator, clients, count - len(chosen), {*busy, *chosen})

    def observe(self, round: int, updates: Sequence[Update], seconds: Mapping[int, float]) -> None:
        for update in updates:
            if _has_loss(update):
                use = update.num_samples * abs(update.metrics["loss"])
                asked = self._known.get(update.client_id, (0.0, 0, 0.0, 0))[3]
                took = seconds.get(update.client_id, 0.0)
                self._known[update.client_id] = (use, round, took, asked + 1)
        self._gains.append(sum(self._known[it.client_id][0] for it in updates if it.client_id in self._known))
        window = self.step_window
        if not self._preferred:
            self._preferred = self.pacer_step
        elif len(self._gains) >= 2 * window and len(self._gains) % window == 0:
            before, now = sum(self._gains[-2 * window : -window]), sum(self._gains[-window:])
            # The pacer: rounds bring less than before, so clients that take longer are accepted.
            if before > now:
                self._preferred += self.pacer_step
        # Only two windows are compared. Cutting at multiples of the window keeps the count above correct.
        self._gains = self._gains[-2 * window :] if len(self._gains) % window == 0 else self._gains

    def state_dict(self) -> dict[str, Any]:
        rows = list(self._known.values())
        return {
            "clients": torch.tensor(list(self._known)),
            **{name: _column(row[place] for row in rows) for place, name in enumerate(_OORT_COLUMNS)},
            "gains": _column(self._gains),
            "preferred": self._preferred,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        columns = (state[name].tolist() for name in _OORT_COLUMNS)
        rows = ((use, int(last), took, int(asked)) for use, last, took, asked in zip(*columns, strict=True))
        self._known = dict(zip(state["clients"].tolist(), rows, strict=True))
        self._gains, self._preferred = state["gains"].tolist(), float(state["preferred"])

    def _use(self, client_id: int, round: int) -> float:
        use, last, took, _ = self._known[client_id]
        # Algorithm 1 of the paper: a term for the uncertainty about clients that were not selected for a long time.
        use += math.sqrt(0.1 * math.log(round) / last) if round > 1 else 0.0
        # The system utility of the paper: (T / t)^α for a client whose duration t is longer than the preferred T.
        if self._preferred and took > self._preferred:
            use *= (self._preferred / took) ** self.penalty
        return use


_OORT_COLUMNS = ("use", "last", "seconds", "asked")

selections: Registry[Callable[..., ClientSelection]] = Registry(
    "selection",
    lambda: {
        "random": RandomSelection,
        "round_robin": RoundRobinSelection,
        "afl": AFLSelection,
        "oort": OortSelection,
    },
)


def _drawn(generator: random.Random, clients: Sequence[int], count: int, taken: Collection[int]) -> list[int]:
    """Draw clients evenly and without replacement, except those that are taken."""
    taken = set(taken)
    # Draws so many more that enough are left without the taken ones; a range is never turned into a list.
    drawn = generator.sample(clients, min(len(clients), max(count, 0) + len(taken)))
    return [client_id for client_id in drawn if client_id not in taken][: max(count, 0)]


def _by_chance(generator: random.Random, chances: Mapping[int, float], count: int) -> list[int]:
    """Draw weighted clients without replacement: those with the largest u^(1/chance), where u is uniform in 0 to 1."""
    keys = {client_id: _key(generator.random(), chance) for client_id, chance in sorted(chances.items())}
    return sorted(keys, key=lambda client_id: (-keys[client_id], client_id))[:count]


def _key(even: float, chance: float) -> float:
    # The logarithm of u^(1/chance), because the power of a small chance underflows to 0.
    return -math.inf if chance <= 0 else math.log(max(even, 1e-300)) / chance


def _has_loss(update: Update) -> bool:
    return math.isfinite(update.metrics.get("loss", math.nan))


def _column(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
