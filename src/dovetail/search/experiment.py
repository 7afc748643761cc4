"""Experiments from Python: run a configuration file like the command line, or search over a Python function.

`Experiment.from_yaml("grid.yaml").run()` starts trials as processes, with a store, restarts and checkpoints.
`search(fn, space)` calls a function with one set of hyperparameters after another, and stores only its return
values.
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
"""A function of a trial's training time, in the unit of the searcher's `time_metric`, and the metric at that time."""


@dataclass(frozen=True)
class Experiment:
    """An experiment from a configuration file.

    Attributes:
        config: The configuration in the file.
        text: The text of the file.
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
            context_dir: The folder with the code, which is copied.
            overrides: Changes of the configuration, such as `searcher.max_trials=4`.

        Raises:
            ConfigErrors: The configuration has mistakes; the message lists all of them.
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
        """Run the experiment until it ends, and return its record. Ctrl-C pauses it.

        Args:
            store: The store; None means the folder `.dovetail`, as `Store.open` finds it.
            follow: Whether to print a line for every trial that starts or ends.
            backend: Where trials run; None means the backend of the configuration.
            observer: A function that receives the record of the experiment a few times per second.
        """
        place = store or Store.open()
        record = self.create(place)
        return Runner(place, record.id, backend, observer or (_Printer() if follow else None)).run()


class TrialStopped(Exception):  # noqa: N818 - not an error: the searcher stops the trial
    """Raised by `report` when the searcher stops a trial; the function must not catch it.

    Attributes:
        state: The final state of the trial.
    """

    def __init__(self, state: TrialState) -> None:
        super().__init__(f"stopped by the searcher: {state}")
        self.state = state


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        trials: All trials, in their order.
        best_trial: The trial with the best value, the first one if several are equal; None if there is no value.
        study: The Optuna study of the same trials, for Optuna's plots.
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
        """The best value."""
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
        fn: A function of hyperparameters and `report`. Its return value, unless it is None, is the final value of the
            metric. `InvalidHP` requests other hyperparameters; any other error ends the search.
        space: The hyperparameters, as in a file: `{"lr": {"type": "log", "minval": -4, "maxval": -1}, "width": 64}`.
        searcher: A name in `searchers`.
        metric: The name of the value.
        max_trials: The number of trials, for searchers with this option.
        smaller_is_better: Whether smaller values of the metric are better.
        seed: The seed; equal seeds give equal trials.
        options: Further options of the searcher.

    Raises:
        ConfigErrors: The space or the options are invalid.

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

        # The defaults bind this trial's number and values: a closure would see the last trial's.
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
    """Run one trial, and return its final state."""
    try:
        returned = fn(hparams, report)
    except TrialStopped as stopped:
        return stopped.state
    except InvalidHP:
        return "INVALID_HP"
    except Exception as error:
        add_note(error, f"with the hyperparameters {hparams}")
        raise
    # The return value counts as one more report, unless it repeats the last one.
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
            # The observer is called several times a second; a line is printed only for a new state.
            if self._seen.get(trial.number) != trial.state:
                self._seen[trial.number] = trial.state
                name, best = record.metric_label, trial.best
                text = "" if best is None else f", best {name} {best:g} after {trial.best_at}"
                print(f"trial {trial.id} {trial.state} {trial.hparams}{text}")
