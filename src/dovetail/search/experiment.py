"""Experiments from Python: a file that is run as the command line does, or a function that is searched right here.

`Experiment.from_yaml("grid.yaml").run()` starts trials as processes, with a store, restarts and checkpoints.
`search(fn, space)` calls a function with one set of hyperparameters after another, and stores only what it
returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.errors import InvalidHP, add_note
from dovetail.extras import require
from dovetail.search.processes import Backend
from dovetail.search.records import ExperimentRecord, TrialRecord, TrialState, best_step
from dovetail.search.runner import Observer, Runner
from dovetail.search.schema import ExperimentConfig, read_experiment
from dovetail.search.searchers import make_searcher, read_searcher
from dovetail.search.searchers.base import verdict
from dovetail.search.space import Space
from dovetail.search.store import Store, trial_record

if TYPE_CHECKING:
    import optuna

Report = Callable[[int, float], None]
"""Takes how long a trial has trained, in the unit of the searcher's `time_metric`, and the value of the metric then."""


@dataclass(frozen=True)
class Experiment:
    """An experiment that a file describes.

    Attributes:
        config: The configuration in the file.
        text: The file.
        context_dir: The folder with the code.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "code").mkdir()
        >>> _ = (folder / "code" / "train.sh").write_text('''
        ... grep -q batch_size "$DOVETAIL_TRIAL"
        ... row='{"group": "validation", "steps_completed": 1, "metrics": {"loss": 0.5}}'
        ... echo "$row" >"${DOVETAIL_TRIAL%/*}/metrics.jsonl"
        ... ''')
        >>> _ = (folder / "grid.yaml").write_text('''
        ... entrypoint: sh train.sh
        ... hyperparameters: {batch_size: {type: categorical, vals: [16, 32]}}
        ... searcher: {name: grid, metric: loss}
        ... ''')
        >>> done = Experiment.from_yaml(folder / "grid.yaml", folder / "code").run(Store.open(folder / "home"))
        >>> done.state, [trial.hparams for trial in done.trials]
        ('COMPLETED', [{'batch_size': 16}, {'batch_size': 32}])
    """

    config: ExperimentConfig
    text: str
    context_dir: Path

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], context_dir: str | os.PathLike[str] = ".", overrides: Sequence[str] = ()
    ) -> Experiment:
        """Return the experiment of a file.

        Args:
            path: The file.
            context_dir: The folder with the code, of which a copy is taken.
            overrides: What to change in the configuration, such as `searcher.max_trials=4`.

        Raises:
            ConfigErrors: All that is wrong with it.
        """
        config = read_experiment(path, overrides, context_dir=context_dir)
        return cls(config, Path(path).read_text(encoding="utf-8"), Path(context_dir))

    def create(self, store: Store | None = None) -> ExperimentRecord:
        """Add the experiment to a store, by default `Store.open()`, without running it."""
        return (store or Store.open()).create_experiment(self.config, self.text, self.context_dir)

    def run(
        self,
        store: Store | None = None,
        *,
        follow: bool = False,
        backend: Backend | None = None,
        observer: Observer | None = None,
    ) -> ExperimentRecord:
        """Run it to its end, and return its record. Ctrl-C pauses it.

        Args:
            store: The store; None means the folder `.dovetail`, as `Store.open` finds it.
            follow: Whether to print a line for every trial that starts or ends.
            backend: Where trials run; None is what the configuration says.
            observer: Is shown the experiment a few times a second.
        """
        place = store or Store.open()
        record = self.create(place)
        return Runner(place, record.id, backend, observer or (_Printer() if follow else None)).run()


class TrialStopped(Exception):  # noqa: N818 - no error: the searcher has seen enough
    """Raised by `report` when the searcher has seen enough of a trial; functions let it pass.

    Attributes:
        state: The final state of the trial.
    """

    def __init__(self, state: TrialState) -> None:
        super().__init__(f"the searcher has seen enough: {state}")
        self.state = state


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        trials: All trials, in their order.
        best_trial: The one with the best value, the first of several; None where none has one.
        study: The same as Optuna's study, for its plots.
    """

    trials: tuple[TrialRecord, ...]
    best_trial: TrialRecord | None
    study: optuna.Study

    @property
    def best_hparams(self) -> dict[str, Any] | None:
        """The hyperparameters of the best trial."""
        return None if self.best_trial is None else self.best_trial.hparams

    @property
    def best_value(self) -> float | None:
        """Its best value."""
        return None if self.best_trial is None else self.best_trial.best


def search(
    fn: Callable[[dict[str, Any], Report], float | None],
    space: Mapping[str, Any],
    searcher: str = "random",
    *,
    metric: str = "loss",
    max_trials: int | None = None,
    smaller_is_better: bool = True,
    seed: int = 0,
    **options: Any,
) -> SearchResult:
    """Search hyperparameters of a function, one trial after another, in this process.

    Args:
        fn: Receives hyperparameters and `report`. Its return value, unless it is None, counts as the value of the
            metric after all reports. `InvalidHP` asks for other hyperparameters; any other error ends the search.
        space: The hyperparameters, as in a file: `{"lr": {"type": "log", "minval": -4, "maxval": -1}, "width": 64}`.
        searcher: A name of `searchers`.
        metric: The name of the value.
        max_trials: How many trials, for searchers with this option.
        smaller_is_better: The direction of the metric.
        seed: Equal seeds give equal trials.
        options: Further options of the searcher.

    Raises:
        ConfigErrors: Space or options cannot be meant.

    Example:
        >>> def parabola(hparams, report):
        ...     return (hparams["x"] - 1) ** 2
        >>> space = {"x": {"type": "double", "minval": -2, "maxval": 2, "count": 5}}
        >>> found = search(parabola, space, "grid")
        >>> found.best_hparams, found.best_value, len(found.trials)
        ({'x': 1.0}, 0.0, 5)
    """
    require("optuna", "search")
    from optuna.storages import InMemoryStorage

    section = {"name": searcher, "metric": metric, "smaller_is_better": smaller_is_better, **options}
    if max_trials is not None:
        section["max_trials"] = max_trials
    ranges = Space(space)
    config = read_searcher(section)
    chooser = make_searcher(config, ranges, seed)
    store = Store(Path(), "memory", InMemoryStorage())
    study_id = store.new_study(metric, smaller_is_better)
    study = store.study(study_id)
    number = 0
    while (suggestion := chooser.suggest(study, number)) is not None:
        hparams = ranges.hparams(suggestion.params)
        trial_id = store.add_trial(
            study_id, suggestion.params, ranges.distributions(), hparams, suggestion.source, suggestion.attributes
        )
        values: dict[int, float] = {}

        def report(step: int, value: float, number: int = number, values: dict[int, float] = values) -> None:
            values[step] = float(value)
            if not chooser.on_validation(number, step, float(value)):
                raise TrialStopped(verdict(config, step))

        state = _called(fn, hparams, report, values)
        for step, value in values.items():
            store.add_value(trial_id, step, value)
        chooser.on_exit(number, state)
        best_at = best_step(values, smaller_is_better)
        best = None if best_at is None else values[best_at]
        store.end_trial(TrialRecord(trial_id, number, study_id, state, hparams, Path(), best=best))
        number += 1
    trials = [trial_record(trial, Path(), smaller_is_better) for trial in study.get_trials(deepcopy=False)]
    measured = {trial.number: trial.best for trial in trials if trial.best is not None}
    best_number = best_step(measured, smaller_is_better)
    return SearchResult(tuple(trials), None if best_number is None else trials[best_number], study)


def _called(
    fn: Callable[[dict[str, Any], Report], float | None],
    hparams: dict[str, Any],
    report: Report,
    values: dict[int, float],
) -> TrialState:
    """Run one trial, and return how it ended."""
    try:
        returned = fn(hparams, report)
    except TrialStopped as stopped:
        return stopped.state
    except InvalidHP:
        return "INVALID_HP"
    except Exception as error:
        add_note(error, f"with the hyperparameters {hparams}")
        raise
    last = max(values, default=-1)
    if returned is not None and values.get(last) != returned:
        values[last + 1] = float(returned)
    return "COMPLETED"


class _Printer:
    """Prints a line for every trial that starts or ends."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}

    def __call__(self, record: ExperimentRecord) -> None:
        """Print what is new."""
        for trial in record.trials:
            if self._seen.get(trial.number) != trial.state:
                self._seen[trial.number] = trial.state
                name, best = record.metric_label, trial.best
                text = "" if best is None else f", best {name} {best:g} after {trial.best_at}"
                print(f"trial {trial.id} {trial.state} {trial.hparams}{text}")
