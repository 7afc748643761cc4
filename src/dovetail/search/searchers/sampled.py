"""Samplers, which choose the hyperparameters of a trial."""

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
    """Returns the points of a grid, one after another.

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
    """Uses a sampler of Optuna, which is created for every trial from the finished ones.

    Args:
        space: The search space.
        seed: The seed of the experiment.
        make: Returns the sampler for a seed.
        smaller_is_better: Whether smaller values of the metric are better.

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
    """The evolution strategy CMA-ES for the numbers of a space; categorical hyperparameters are random.

    The strategy is created for every trial and receives the completed trials, in the order of their numbers and in
    groups of the population size, so that its whole state follows from the study.

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
        """Return a point of the distribution that results from the completed trials."""
        optuna, numpy = require("optuna", "search"), require("numpy", "search")
        chance = generator(self._seed, number)
        params = self._space.sample(chance)
        strategy = self._strategy(chance.getrandbits(31))
        completed = [
            (
                numpy.array([axis.place(trial.params[axis.name]) for axis in self._axes]),
                comparable(self._sign * trial.value),
            )
            for trial in _finished(study, optuna.trial.TrialState.COMPLETE)
            if trial.value is not None
        ]
        size = self._population_size
        # CMA-ES updates its distribution once per complete population; the rest waits for further trials.
        for first in range(0, len(completed) - size + 1, size):
            strategy.tell(completed[first : first + size])
            if strategy.should_stop():
                strategy = self._strategy(chance.getrandbits(31))
        places = strategy.ask()
        return params | {axis.name: axis.at(float(place)) for axis, place in zip(self._axes, places, strict=True)}

    def _strategy(self, seed: int) -> Any:
        numpy = require("numpy", "search")
        count = len(self._axes)
        return require("cmaes", "search").CMA(
            mean=numpy.full(count, 0.5),
            # The whole range, of positions from 0 to 1, is three standard deviations to either side of its middle.
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
    """Return trials with infinite values replaced by the smallest or largest finite value."""
    numbers = [value for trial in trials for value in _values(trial) if math.isfinite(value)]
    # A model such as a Gaussian process cannot be fitted to an infinite loss.
    least, most = min(numbers, default=0.0), max(numbers, default=0.0)

    def finite(value: float) -> float:
        # Samplers handle NaN themselves as the worst value.
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
    """Return a storage that contains some finished trials without copying them, because copying is slow."""
    from optuna.storages import InMemoryStorage

    class Finished(InMemoryStorage):
        def get_all_trials(
            self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
        ) -> list[FrozenTrial]:
            return [trial for trial in trials if states is None or trial.state in states]

    return Finished()
