"""Base classes of searchers, which choose the trials to run and those to stop early."""

from __future__ import annotations

import random
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import misspelled_methods
from dovetail.search.records import TrialState
from dovetail.units import TrainUnit, check_count

if TYPE_CHECKING:
    from optuna import Study

WORST = sys.float_info.max
"""The value of a failed trial, and of a metric that is not a number, because JSON has no infinity."""


@dataclass(frozen=True)
class SearcherConfig:
    """The section `searcher` of a configuration.

    Attributes:
        name: A name in `searchers`.
        metric: The validation metric that compares trials; empty for a job, and if the file sets none.
        smaller_is_better: Whether smaller values of the metric are better.
        time_metric: The unit of the argument `time` of `on_validation`: `batches`, `epochs` or another reported number.
        max_length: How long trials train, if the file sets it.
        source_trial_id: The trial in the store whose checkpoint all trials start from, if any.
        options: The options of the searcher itself, each with its value or default.
    """

    name: str
    metric: str
    smaller_is_better: bool = True
    time_metric: str = "batches"
    max_length: TrainUnit | None = None
    source_trial_id: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def verdict(searcher: SearcherConfig, time: float) -> Literal["STOPPED", "COMPLETED"]:
    """Return the final state of a trial that its searcher has stopped: at `max_time` it is complete."""
    longest = searcher.options.get("max_time")
    return "COMPLETED" if longest is not None and time >= longest else "STOPPED"


@dataclass(frozen=True)
class Suggestion:
    """A trial to run.

    Attributes:
        params: The searched hyperparameters by their dotted names; `Space.hparams` adds the constants.
        source: The number of the trial whose newest checkpoint to start from, or None.
        attributes: Further values about the trial for display, such as its bracket.
    """

    params: dict[str, Any]
    source: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


class Searcher(ABC):
    """Base class of searchers: chooses the trials to run, and the trials to stop early.

    The runner calls it from one thread: `suggest` with 0, 1, 2, … while trials may start, `on_validation` and
    `on_exit` when trials report and end. It saves `state_dict` after each of these calls. The results of a searcher
    may depend only on its arguments, this state and the *finished* trials of the study. Calling `suggest` again with
    the same number must give the same result, because the runner that follows a killed one calls it again.

    Example:
        >>> class Twice(Searcher):
        ...     def suggest(self, study, number):
        ...         return Suggestion({}) if number < 2 else None
        ...
        ...     def is_over(self):
        ...         return False
        >>> Twice().suggest(None, 1)
        Suggestion(params={}, source=None, attributes={})
    """

    max_concurrent_trials: int = 1

    @abstractmethod
    def suggest(self, study: Study, number: int) -> Suggestion | None:
        """Return the next trial; None if there is none now.

        Args:
            study: The trials so far; it must not be changed.
            number: The number of trials that were created before.
        """

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether no trial is left to suggest. An experiment ends when this is True and no trial runs."""

    def on_validation(self, number: int, time: int, value: float) -> bool:
        """Receive the metric of a trial, in the order of its reports; return False to stop the trial.

        Args:
            number: The number of the trial.
            time: Its number of batches, epochs, … so far: `SearcherConfig.time_metric`.
            value: The metric as it was reported.
        """
        return True

    def on_exit(self, number: int, state: TrialState) -> None:  # noqa: B027 - optional
        """Receive the final state of a trial, which will not be restarted.

        Args:
            number: The number of the trial.
            state: Its final state; `INVALID_HP` requests another trial in its place.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything learnt so far, in a form that JSON can represent."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Restore the state returned by `state_dict`."""


class Sampler(ABC):
    """Base class of samplers: chooses the hyperparameters of a trial, depending on its arguments only.

    Example:
        >>> class Middle(Sampler):
        ...     def sample(self, study, number):
        ...         return {"lr": 0.5}
        >>> Middle().sample(None, 0)
        {'lr': 0.5}
    """

    @abstractmethod
    def sample(self, study: Study, number: int) -> dict[str, Any]:
        """Return the searched hyperparameters of trial `number`, by their dotted names."""


class StoppingRule(ABC):
    """Base class of stopping rules. Smaller values are better, and values are never NaN or infinite."""

    @abstractmethod
    def report(self, number: int, time: int, value: float) -> bool:
        """Receive the metric of a trial; return False to stop it."""

    def admit(self, number: int) -> dict[str, Any]:
        """Add a trial, and return attributes for display; return the same if it was added before."""
        return {}

    def leave(self, number: int, state: TrialState) -> None:  # noqa: B027 - optional
        """Receive the final state of a trial."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything learnt so far, in a form that JSON can represent."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Restore the state returned by `state_dict`."""


class NeverStop(StoppingRule):
    """A stopping rule that stops no trial."""

    def report(self, number: int, time: int, value: float) -> bool:
        return True


class Composed(Searcher):
    """A searcher that combines a sampler and a stopping rule.

    Args:
        sampler: Chooses hyperparameters.
        rule: Stops trials early.
        max_trials: The number of trials.
        max_concurrent_trials: The number of trials at the same time.
        smaller_is_better: Whether smaller values of the metric are better.
        replaces_invalid: Whether a trial with invalid hyperparameters is replaced by another one, at most
            `max_trials` times.

    Example:
        >>> from dovetail.search.searchers.sampled import RandomSampler
        >>> from dovetail.search.space import Space
        >>> space = Space({"act": {"type": "categorical", "vals": ["relu"]}})
        >>> searcher = Composed(RandomSampler(space, seed=0), NeverStop(), max_trials=1)
        >>> searcher.suggest(None, 0).params, searcher.suggest(None, 1), searcher.is_over()
        ({'act': 'relu'}, None, True)
    """

    def __init__(
        self,
        sampler: Sampler,
        rule: StoppingRule,
        *,
        max_trials: int,
        max_concurrent_trials: int = 1,
        smaller_is_better: bool = True,
        replaces_invalid: bool = True,
    ) -> None:
        check_count("Composed: max_trials", max_trials)
        check_count("Composed: max_concurrent_trials", max_concurrent_trials)
        for sentence in (*_unused_of_sampler(sampler), *_unused_of_rule(type(rule))):
            warnings.warn(sentence, UserWarning, stacklevel=2)
        self.max_concurrent_trials = max_concurrent_trials
        self._sampler = sampler
        self._rule = rule
        self._max_trials = max_trials
        self._max_replaced = max_trials if replaces_invalid else 0
        self._sign = 1.0 if smaller_is_better else -1.0
        self._num_created = 0
        self._invalid: set[int] = set()

    def suggest(self, study: Study, number: int) -> Suggestion | None:
        if number >= self._limit:
            return None
        # A killed runner may have requested this number before, so it is not counted twice.
        self._num_created = max(self._num_created, number + 1)
        return Suggestion(self._sampler.sample(study, number), attributes=self._rule.admit(number))

    def on_validation(self, number: int, time: int, value: float) -> bool:
        return self._rule.report(number, time, comparable(self._sign * value))

    def on_exit(self, number: int, state: TrialState) -> None:
        if state == "INVALID_HP":
            self._invalid.add(number)
        self._rule.leave(number, state)

    def is_over(self) -> bool:
        return self._num_created >= self._limit

    def state_dict(self) -> dict[str, Any]:
        return {"created": self._num_created, "invalid": sorted(self._invalid), "rule": self._rule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_created = state["created"]
        self._invalid = set(state["invalid"])
        self._rule.load_state_dict(state["rule"])

    @property
    def _limit(self) -> int:
        return self._max_trials + min(len(self._invalid), self._max_replaced)


def _unused_of_sampler(sampler: Sampler) -> Iterator[str]:
    """Yield a sentence about each method of a sampler that is never called."""
    # An object that is both a sampler and a rule is called as a rule, too.
    names = () if isinstance(sampler, StoppingRule) else ("on_validation", "on_exit", "state_dict", "load_state_dict")
    for name in names:
        if hasattr(sampler, name):
            yield f"Composed never calls {type(sampler).__name__}.{name}: it calls only sample of a sampler"


def _unused_of_rule(kind: type[StoppingRule]) -> Iterator[str]:
    """Yield a sentence about each method of a stopping rule that has no effect."""
    answers = {"on_validation": "report", "on_exit": "leave"}
    wrong = {name: answers[name] for name in answers if hasattr(kind, name)} | dict(
        misspelled_methods(kind, StoppingRule)
    )
    for name, right in wrong.items():
        yield f"Composed never calls {kind.__name__}.{name}: did you mean {right}?"
    saves = kind.state_dict is not StoppingRule.state_dict
    restores = kind.load_state_dict is not StoppingRule.load_state_dict
    if saves and not restores:
        yield f"{kind.__name__} defines state_dict without load_state_dict: its state is saved and never restored"
    if restores and not saves:
        yield f"{kind.__name__} defines load_state_dict without state_dict: the saved state is empty"


def comparable(value: float) -> float:
    """Return a value that can be sorted and stored as JSON; NaN becomes the worst value."""
    # NaN is the only value that differs from itself.
    return WORST if value != value else max(-WORST, min(value, WORST))


def generator(seed: int, number: int) -> random.Random:
    """Return the random generator of one trial: the same in every process and version of Python."""
    # Python hashes text with SHA-512 here; the hash of other seeds may differ between versions.
    return random.Random(f"{seed}/{number}")
