"""Population based training: the worst trials are replaced by changed copies of better ones."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.search.records import TrialState
from dovetail.search.searchers.base import Searcher, Suggestion, comparable, generator
from dovetail.search.space import Space

if TYPE_CHECKING:
    from optuna import Study


@dataclass
class _Member:
    """A trial: its suggestion, and the next round in which it will be compared."""

    params: dict[str, Any]
    source: int | None = None
    round: int = 1
    is_over: bool = False
    is_invalid: bool = False


@dataclass
class _State:
    members: dict[int, _Member] = field(default_factory=dict)
    # For every round, the sorted values, each with the number of its trial.
    rounds: list[list[list[float]]] = field(default_factory=list)
    # Stopped trials without a successor: the trial to copy, and the round after which it stopped.
    vacancies: list[list[int]] = field(default_factory=list)


class PopulationBasedTraining(Searcher):
    """Trains a population; at every interval the worst trials are replaced by changed copies of the best.

    A trial that reaches an interval is compared with those that have reached it before. If it is in the last
    `truncate_fraction` of them, it is stopped, and a new trial starts from the newest checkpoint of a random trial of
    the first `truncate_fraction`. The new trial copies the hyperparameters of that trial. Each is drawn again with
    `resample_probability` and otherwise, if it is a number, multiplied by one of `perturb_factors`.

    Args:
        space: The search space.
        seed: The seed of the experiment.
        max_time: The time at which trials end.
        population_size: The number of trials that train at the same time.
        num_rounds: The number of intervals of `max_time`.
        truncate_fraction: The share of the trials that is stopped at an interval, and the share that is copied.
        perturb_factors: The factors by which numbers are multiplied.
        resample_probability: The probability that a hyperparameter is drawn again.
        max_trials: The number of trials, including copies; None means no limit.
        max_concurrent_trials: The number of trials at the same time; None means `population_size`.
        smaller_is_better: Whether smaller values of the metric are better.

    Example:
        >>> space = Space({"lr": {"type": "log", "minval": -4, "maxval": -1}})
        >>> searcher = PopulationBasedTraining(space, 0, max_time=10, population_size=2, truncate_fraction=0.5)
        >>> first, second = searcher.suggest(None, 0), searcher.suggest(None, 1)
        >>> searcher.on_validation(0, time=1, value=0.1), searcher.on_validation(1, time=1, value=0.9)
        (True, False)
        >>> searcher.suggest(None, 2).source
        0
    """

    def __init__(
        self,
        space: Space,
        seed: int,
        *,
        max_time: int,
        population_size: int = 16,
        num_rounds: int = 10,
        truncate_fraction: float = 0.2,
        perturb_factors: Sequence[float] = (0.8, 1.2),
        resample_probability: float = 0.25,
        max_trials: int | None = None,
        max_concurrent_trials: int | None = None,
        smaller_is_better: bool = True,
    ) -> None:
        if truncate_fraction > 0 and int(truncate_fraction * population_size) == 0:
            warnings.warn(
                f"pbt: a truncate_fraction of {truncate_fraction:g} of {population_size} trials is less than one "
                "trial, so that none is replaced by a copy of a better one: "
                f"expected at least {1 / population_size:.4g}",
                UserWarning,
                stacklevel=2,
            )
        self.max_concurrent_trials = max_concurrent_trials or population_size
        self._space = space
        self._seed = seed
        self._population_size = population_size
        self._interval = max(max_time // num_rounds, 1)
        self._num_rounds = max(min(num_rounds, max_time), 1)
        self._max_time = max_time
        self._fraction = truncate_fraction
        self._factors = list(perturb_factors)
        self._resample_probability = resample_probability
        # At most all trials of a round end, so this also limits the copies if all hyperparameters are invalid.
        self._max_trials = population_size * self._num_rounds if max_trials is None else max_trials
        self._sign = 1.0 if smaller_is_better else -1.0
        self._state = _State(rounds=[[] for _ in range(self._num_rounds)])

    def suggest(self, study: Study, number: int) -> Suggestion | None:
        """Return a random trial until the population is complete, then the successor of a stopped one."""
        members, vacancies = self._state.members, self._state.vacancies
        if number not in members:
            if number >= self._max_trials or (self._num_lacking == 0 and not vacancies):
                return None
            if self._num_lacking:
                members[number] = _Member(self._space.sample(generator(self._seed, number)))
            else:
                source, after = vacancies.pop(0)
                members[number] = _Member(self._perturbed(source, number), source, after + 1)
        member = members[number]
        attributes = {} if member.source is None else {"round": member.round - 1}
        return Suggestion(dict(member.params), member.source, attributes)

    def on_validation(self, number: int, time: int, value: float) -> bool:
        """Compare a trial at every interval that it has reached."""
        member = self._state.members[number]
        while not member.is_over and time >= self._time(member.round):
            entries = self._state.rounds[member.round - 1]
            score = comparable(self._sign * value)
            # Of equal values the earlier one is better.
            position = bisect_right(entries, score, key=lambda entry: entry[0])
            entries.insert(position, [score, number])
            if member.round == self._num_rounds:
                member.is_over = True
            elif position >= len(entries) - self._num_truncated(entries):
                member.is_over = True
                self._state.vacancies.append([self._leader(number, member.round), member.round])
            member.round += 1
        return not member.is_over

    def on_exit(self, number: int, state: TrialState) -> None:
        """Replace a trial that was invalid, or that failed after others had passed its last interval."""
        if number not in self._state.members:
            return
        member = self._state.members[number]
        was_over, member.is_over = member.is_over, True
        passed = member.round - 1
        if was_over:
            return
        if state == "INVALID_HP":
            member.is_invalid = True
            for entries in self._state.rounds:
                entries[:] = [entry for entry in entries if entry[1] != number]
            if member.source is not None:
                # Another copy of the same source; a founder is replaced by `_num_lacking` instead.
                self._state.vacancies.append([member.source, passed])
        # A trial that failed as the only one or the best of its round has no better trial to copy.
        elif state == "ERROR" and passed > 0 and self._state.rounds[passed - 1][0][1] != number:
            self._state.vacancies.append([self._leader(number, passed), passed])

    def is_over(self) -> bool:
        created = max(self._state.members, default=-1) + 1
        return created >= self._max_trials or (self._num_lacking == 0 and not self._state.vacancies)

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self._state)
        return {**state, "members": {str(number): member for number, member in state["members"].items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = _State(
            {int(number): _Member(**member) for number, member in state["members"].items()},
            [[list(entry) for entry in entries] for entries in state["rounds"]],
            [list(vacancy) for vacancy in state["vacancies"]],
        )

    @property
    def _num_lacking(self) -> int:
        founders = sum(member.source is None and not member.is_invalid for member in self._state.members.values())
        return max(self._population_size - founders, 0)

    def _time(self, number: int) -> int:
        """Return the end time of a round; the last round ends with the run."""
        return self._max_time if number == self._num_rounds else number * self._interval

    def _num_truncated(self, entries: list[list[float]]) -> int:
        # At most half, so that no copied trial is stopped.
        return int(min(self._fraction, 0.5) * len(entries))

    def _leader(self, number: int, after: int) -> int:
        """Return a random one of the best trials of a round."""
        entries = self._state.rounds[after - 1]
        best = [int(entry[1]) for entry in entries[: max(self._num_truncated(entries), 1)] if entry[1] != number]
        # A negative number, so that this draw is independent of the hyperparameters of trial `number`.
        return generator(self._seed, -1 - number).choice(best)

    def _perturbed(self, source: int, number: int) -> dict[str, Any]:
        chance = generator(self._seed, number)
        params = dict(self._state.members[source].params)
        for name, parameter in self._space.parameters.items():
            if chance.random() < self._resample_probability:
                params[name] = parameter.at(chance.random())
            else:
                params[name] = parameter.scaled(params[name], chance.choice(self._factors))
        return params
