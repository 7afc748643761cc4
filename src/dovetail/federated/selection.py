"""Who is asked in a round."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from dovetail.errors import expect
from dovetail.federated.messages import Update
from dovetail.registry import Registry
from dovetail.runtime.seeds import derive_seed

__all__ = ["AFLSelection", "ClientSelection", "OortSelection", "RandomSelection", "RoundRobinSelection", "selections"]


class ClientSelection(ABC):
    """Chooses the clients of a round, and may learn from what they report.

    Args:
        seed: All its randomness comes from it.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @abstractmethod
    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        """Return the ids of up to `count` different clients, in the order in which they are asked.

        Args:
            round: The round, counted from 1.
            clients: The ids of all, mostly a `range`: there may be millions, so do not go through them.
            count: How many are wanted.
            busy: Who is still at work for an earlier round.
        """

    def observe(  # noqa: B027 - most learn nothing
        self, round: int, updates: Sequence[Update], seconds: Mapping[int, float]
    ) -> None:
        """Hear what the clients of a round have reported.

        Args:
            round: The round, counted from 1.
            updates: The ones that were used.
            seconds: How long each client took, in simulated time.
        """

    def generator(self, round: int) -> random.Random:
        """Return the generator of a round: the same for the same seed and round, whatever happened before."""
        return random.Random(derive_seed(self.seed, "selection", round))

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most learn nothing
        """Take back what `state_dict` gave."""


class RandomSelection(ClientSelection):
    """Every client with the same chance, in a time that does not depend on how many there are.

    Example:
        >>> RandomSelection(seed=1).select(1, range(1, 1_000_001), count=3)
        [972909, 633258, 27567]
    """

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        return _drawn(self.generator(round), clients, count, busy)


class RoundRobinSelection(ClientSelection):
    """One after the other, from the first to the last and again.

    Example:
        >>> selection = RoundRobinSelection()
        >>> selection.select(1, range(1, 6), count=3), selection.select(2, range(1, 6), count=3)
        ([1, 2, 3], [4, 5, 1])
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._next = 0

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        taken = set(busy)
        chosen: list[int] = []
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


class AFLSelection(ClientSelection):
    """Active federated learning: clients whose data the model fits badly come more often (Goetz et al., 2019).

    A client is worth the sum of its losses over the root of its samples. The share `alpha1` of the clients that are
    worth least counts as nothing, the others by exp(alpha2 · worth); of a round, the share `alpha3` is drawn from all
    evenly, which is how clients that were never asked come in.

    Args:
        seed: All its randomness comes from it.
        alpha1: See above.
        alpha2: See above.
        alpha3: See above.

    Example:
        >>> selection = AFLSelection(alpha1=0.5, alpha2=10.0, alpha3=0.0)
        >>> reports = [Update(k, 1, 100, metrics={"loss": k / 10}) for k in range(1, 11)]
        >>> selection.observe(1, reports, {})
        >>> sorted(selection.select(2, range(1, 1001), count=2))
        [9, 10]
    """

    def __init__(self, seed: int = 0, alpha1: float = 0.75, alpha2: float = 0.01, alpha3: float = 0.1) -> None:
        super().__init__(seed)
        for name, share in (("alpha1", alpha1), ("alpha3", alpha3)):
            expect(0 <= share <= 1, name, "a share from 0 to 1", share)
        self.alpha1, self.alpha2, self.alpha3 = alpha1, alpha2, alpha3
        self._worth: dict[int, float] = {}

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        generator = self.generator(round)
        worth = {client_id: worth for client_id, worth in self._worth.items() if client_id not in busy}
        ordered = sorted(worth, key=lambda client_id: (worth[client_id], client_id))
        ignored = set(ordered[: math.floor(self.alpha1 * len(ordered))])
        top = max(worth.values(), default=0.0)
        # Only proportions matter: without the largest exponent, none overflows.
        chances = {
            client_id: (0.0 if client_id in ignored else math.exp(self.alpha2 * (value - top)))
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


class OortSelection(ClientSelection):
    """Oort: clients that help the model most for the time they take (Lai et al., 2021).

    A client's use is its samples times its loss, and more the longer it was not asked; one that takes longer than the
    preferred duration loses (duration / preferred)^-penalty of it. The pacer lengthens that duration when rounds help
    less than those before. A share of every round, less and less, goes to clients that were never asked; who was asked
    `blacklist_rounds` times is not asked again. The loss of a client is the mean of its training, where the paper has
    the root mean square over its samples.

    Args:
        seed: All its randomness comes from it.
        exploration: The share of new clients in the first round.
        exploration_decay: What is left of that share from round to round.
        min_exploration: The least share.
        penalty: The exponent of slow clients.
        cutoff: Drawn by their use are clients that have at least this share of that of the last one in the ranking.
        step_window: Rounds over which the pacer looks.
        pacer_step: Simulated seconds by which it goes.
        blacklist_rounds: How often a client is asked at most; None for ever.

    Example:
        >>> selection = OortSelection(exploration=0.0, min_exploration=0.0)
        >>> reports = [Update(k, 1, 100, metrics={"loss": 1.0 if k < 9 else 9.0}) for k in range(1, 11)]
        >>> selection.observe(1, reports, {})
        >>> sorted(selection.select(2, range(1, 1001), count=2))
        [9, 10]
    """

    def __init__(
        self,
        seed: int = 0,
        exploration: float = 0.9,
        exploration_decay: float = 0.98,
        min_exploration: float = 0.2,
        penalty: float = 2.0,
        cutoff: float = 0.95,
        step_window: int = 20,
        pacer_step: float = 10.0,
        blacklist_rounds: int | None = 10,
    ) -> None:
        super().__init__(seed)
        self.exploration, self.exploration_decay, self.min_exploration = exploration, exploration_decay, min_exploration
        self.penalty, self.cutoff = penalty, cutoff
        self.step_window, self.pacer_step, self.blacklist_rounds = step_window, pacer_step, blacklist_rounds
        # By client: its use, the round of its last report, how long it took, and how often it was asked.
        self._known: dict[int, tuple[float, int, float, int]] = {}
        self._gains: list[float] = []
        self._preferred = 0.0

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        generator = self.generator(round)
        usable = {
            client_id: self._use(client_id, round)
            for client_id, (_, _, _, asked) in self._known.items()
            if client_id not in busy and (self.blacklist_rounds is None or asked < self.blacklist_rounds)
        }
        share = max(self.min_exploration, self.exploration * self.exploration_decay ** (round - 1))
        unseen = len(clients) - len(self._known)
        wanted = max(count - min(math.floor(share * count + 0.5), unseen), 0)
        ranked = sorted(usable.values(), reverse=True)
        if len(ranked) > wanted > 0:
            limit = self.cutoff * ranked[wanted - 1]
            usable = {client_id: use for client_id, use in usable.items() if use >= limit}
        chosen = _by_chance(generator, usable, wanted)
        chosen += _drawn(generator, clients, count - len(chosen), {*busy, *chosen, *self._known})
        # Where all have been asked, those who were asked too often are better than nobody.
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
            if before > now:
                self._preferred += self.pacer_step
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
        use += math.sqrt(0.1 * math.log(round) / last) if round > 1 else 0.0
        if self._preferred and took > self._preferred:
            use *= (self._preferred / took) ** self.penalty
        return use


_OORT_COLUMNS = ("use", "last", "seconds", "asked")

selections: Registry[type[ClientSelection]] = Registry(
    "selection",
    lambda: {
        "random": RandomSelection,
        "round_robin": RoundRobinSelection,
        "afl": AFLSelection,
        "oort": OortSelection,
    },
)


def _drawn(generator: random.Random, clients: Sequence[int], count: int, taken: Collection[int]) -> list[int]:
    """Draw clients evenly and without replacement, and none that are taken."""
    taken = set(taken)
    drawn = generator.sample(clients, min(len(clients), max(count, 0) + len(taken)))
    return [client_id for client_id in drawn if client_id not in taken][: max(count, 0)]


def _by_chance(generator: random.Random, chances: Mapping[int, float], count: int) -> list[int]:
    """Draw clients by their chances and without replacement: the largest of u^(1/chance), u even in 0 to 1."""
    keys = {client_id: _key(generator.random(), chance) for client_id, chance in sorted(chances.items())}
    return sorted(keys, key=lambda client_id: (-keys[client_id], client_id))[:count]


def _key(even: float, chance: float) -> float:
    return -math.inf if chance <= 0 else math.log(max(even, 1e-300)) / chance


def _has_loss(update: Update) -> bool:
    return math.isfinite(update.metrics.get("loss", math.nan))


def _column(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
