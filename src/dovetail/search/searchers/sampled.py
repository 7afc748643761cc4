"""Samplers: where the hyperparameters of a trial come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from copy import copy
from typing import TYPE_CHECKING, Any

from dovetail.extras import require
from dovetail.printing import quiet
from dovetail.search.searchers.base import Sampler, comparable, generator
from dovetail.search.space import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.storages import InMemoryStorage
    from optuna.trial import FrozenTrial, TrialState


class RandomSampler(Sampler):
    """Draws every hyperparameter from its range.

    Example:
        >>> sampler = RandomSampler(Space({"lr": {"type": "log", "minval": -4, "maxval": -1}}), seed=7)
        >>> sampler.sample(None, 3) == sampler.sample(None, 3) != sampler.sample(None, 4)
        True
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed

    def sample(self, study: Study, number: int) -> dict[str, Any]:
        return self._space.sample(generator(self._seed, number))


class GridSampler(Sampler):
    """Goes through all points of the grid.

    Example:
        >>> sampler = GridSampler(Space({"size": {"type": "categorical", "vals": [16, 32]}}))
        >>> sampler.sample(None, 1), len(sampler)
        ({'size': 32}, 2)
    """

    def __init__(self, space: Space) -> None:
        self._points = space.grid()

    def __len__(self) -> int:
        return len(self._points)

    def sample(self, study: Study, number: int) -> dict[str, Any]:
        return dict(self._points[number])


class OptunaSampler(Sampler):
    """Asks a sampler of Optuna that is created for every trial from the finished ones.

    Args:
        space: What to choose.
        seed: The seed of the experiment.
        make: Returns the sampler for a seed.
        smaller_is_better: The direction of the metric.

    Example:
        >>> import optuna
        >>> space = Space({"x": {"type": "double", "minval": 0, "maxval": 1}})
        >>> sampler = OptunaSampler(space, 0, lambda seed: optuna.samplers.TPESampler(seed=seed))
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> list(sampler.sample(optuna.create_study(), 0))
        ['x']
    """

    def __init__(
        self, space: Space, seed: int, make: Callable[[int], BaseSampler], smaller_is_better: bool = True
    ) -> None:
        self._space = space
        self._seed = seed
        self._make = make
        self._direction = "minimize" if smaller_is_better else "maximize"

    def sample(self, study: Study, number: int) -> dict[str, Any]:
        optuna = require("optuna", "search")
        states = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
        # A separate study, because samplers write to it and read trials that still run.
        storage = _storage_of(_with_finite_values(_finished(study, *states)))
        sampler = self._make(generator(self._seed, number).getrandbits(32))
        with quiet("optuna"):
            finished = optuna.create_study(storage=storage, sampler=sampler, direction=self._direction)
        params: dict[str, Any] = finished.ask(self._space.distributions()).params
        return params


class CmaSampler(Sampler):
    """The evolution strategy CMA-ES over the numbers of a space; what is categorical is drawn at random.

    The strategy is made anew for every trial and told the completed ones, in the order of their numbers and as many
    at a time as its population has: all that it knows is in the study.

    Example:
        >>> import optuna
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> axis = {"type": "double", "minval": -1, "maxval": 1}
        >>> sorted(CmaSampler(Space({"x": axis, "y": axis}), seed=0).sample(optuna.create_study(), 0))
        ['x', 'y']
    """

    def __init__(
        self, space: Space, seed: int, population_size: int | None = None, smaller_is_better: bool = True
    ) -> None:
        self._space = space
        self._seed = seed
        self._axes = [parameter for parameter in space.parameters.values() if parameter.is_numeric]
        self._population_size = population_size or 4 + int(3 * math.log(max(1, len(self._axes))))
        self._sign = 1.0 if smaller_is_better else -1.0

    def sample(self, study: Study, number: int) -> dict[str, Any]:
        """Return a point of the distribution that the completed trials lead to."""
        optuna, numpy = require("optuna", "search"), require("numpy", "search")
        chance = generator(self._seed, number)
        params = self._space.sample(chance)
        strategy = self._strategy(chance.getrandbits(31))
        told = [
            (
                numpy.array([axis.place(trial.params[axis.name]) for axis in self._axes]),
                comparable(self._sign * trial.value),
            )
            for trial in _finished(study, optuna.trial.TrialState.COMPLETE)
            if trial.value is not None
        ]
        size = self._population_size
        for first in range(0, len(told) - size + 1, size):
            strategy.tell(told[first : first + size])
            if strategy.should_stop():
                strategy = self._strategy(chance.getrandbits(31))
        places = strategy.ask()
        return params | {axis.name: axis.at(float(place)) for axis, place in zip(self._axes, places, strict=True)}

    def _strategy(self, seed: int) -> Any:
        numpy = require("numpy", "search")
        count = len(self._axes)
        return require("cmaes", "search").CMA(
            mean=numpy.full(count, 0.5),
            sigma=1 / 6,
            bounds=numpy.array([[0.0, 1.0]] * count),
            seed=seed,
            population_size=self._population_size,
        )


def _finished(study: Study, *states: Any) -> list[FrozenTrial]:
    """Return the trials of a study in some states that have a value or values, by number."""
    trials = study.get_trials(deepcopy=False, states=states)
    return sorted(
        (trial for trial in trials if trial.value is not None or trial.intermediate_values),
        key=lambda trial: trial.number,
    )


def _with_finite_values(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Return trials with the smallest or largest number of all in place of what is infinite."""
    numbers = [value for trial in trials for value in _values(trial) if math.isfinite(value)]
    least, most = min(numbers, default=0.0), max(numbers, default=0.0)

    def finite(value: float) -> float:
        # Samplers know of NaN themselves: it is worst.
        return value if math.isnan(value) else min(max(value, least), most)

    def changed(trial: FrozenTrial) -> FrozenTrial:
        if all(map(math.isfinite, _values(trial))):
            return trial
        copied = copy(trial)
        copied.intermediate_values = {step: finite(value) for step, value in trial.intermediate_values.items()}
        if trial.value is not None:
            copied.value = finite(trial.value)
        return copied

    return [changed(trial) for trial in trials]


def _values(trial: FrozenTrial) -> list[float]:
    return [*trial.intermediate_values.values(), *([] if trial.value is None else [trial.value])]


def _storage_of(trials: list[FrozenTrial]) -> InMemoryStorage:
    """Return a storage that has some finished trials, as they are: to copy a thousand takes longer than to think."""
    from optuna.storages import InMemoryStorage

    class Finished(InMemoryStorage):
        def get_all_trials(
            self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
        ) -> list[FrozenTrial]:
            return [trial for trial in trials if states is None or trial.state in states]

    return Finished()
