"""Demo `dovetail demo experiment`: a hyperparameter search."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dovetail.demos.catalogue import Outcome
from dovetail.errors import DovetailError
from dovetail.search import Experiment, Store
from dovetail.search.charts import shown
from dovetail.search.records import ExperimentRecord, TrialRecord
from dovetail.search.report import report, searched_names
from dovetail.units import counted

_SEARCH = """\
name: spirals
entrypoint: python3 train.py
hyperparameters:
  learning_rate: {type: log, minval: -4, maxval: -1}
  width: {type: int, minval: 8, maxval: 128}
  dropout: {type: double, minval: 0.0, maxval: 0.6}
searcher:
  name: async_halving
  metric: accuracy
  smaller_is_better: false
  max_trials: 8
  num_rungs: 3
  divisor: 3
  max_length: {epochs: 27}
max_restarts: 0
"""


def run(folder: Path, *, settings: tuple[str, ...] = ()) -> Outcome:
    """Write the code and the configuration of a search, run it, and write a report."""
    # The user can change both files and run the search again with the command that the demo prints.
    code, file = folder / "code", folder / "search.yaml"
    store = Store.open(folder / "home")
    code.mkdir()
    script = resources.files("dovetail.demos").joinpath("spirals_trial.py").read_text(encoding="utf-8")
    (code / "train.py").write_text(script, encoding="utf-8")
    file.write_text(_SEARCH, encoding="utf-8")

    done = Experiment.from_yaml(file, code, settings).run(store, observer=_Lines())
    best = done.best_trial
    # The search itself does not raise if all its trials fail.
    if best is None:
        failed = next((trial for trial in done.trials if trial.reason), None)
        why = "" if failed is None else f": {failed.reason} (see {failed.directory / 'log.txt'})"
        raise DovetailError(f"no trial has reported an accuracy{why}")
    written = report(done, folder / "report.html")
    if len(written) == 1:
        print("the report has no images, because matplotlib is not installed: pip install 'dovetail[plot]'")
    names, num_early = sorted(searched_names(done)), sum(trial.state == "STOPPED" for trial in done.trials)
    # A trial without a value comes last, like an accuracy of 0.
    ranked = sorted(done.trials, key=lambda trial: -(trial.best or 0.0))
    return Outcome(
        f"best accuracy {best.best:.1%} (trial {best.id}); {num_early} of {len(done.trials)} trials stopped early",
        {
            "report.html": "the report, a single file that needs no network",
            "report-curves.png": "the accuracy of each trial until it ended",
            "report-parallel.png": "hyperparameters and accuracy side by side",
            "search.yaml": "the configuration of the search",
            "code": "the code of a trial",
            "home": "the results, logs and checkpoints of all trials",
        },
        ("trial", "accuracy", "batches", *names, "state"),
        [_row(trial, names) for trial in ranked],
    )


class _Lines:
    """Prints a line for every trial that has ended."""

    def __init__(self) -> None:
        self._said: set[int] = set()

    def __call__(self, record: ExperimentRecord) -> None:
        for trial in record.trials:
            if trial.id not in self._said and trial.state not in ("RUNNING", "WAITING"):
                self._said.add(trial.id)
                print(
                    f"trial {trial.id} {trial.state.lower()} after {counted(trial.steps, 'batch', 'batches')}: "
                    f"accuracy {shown(trial.best)}",
                    flush=True,
                )


def _row(trial: TrialRecord, names: list[str]) -> list[str]:
    return [
        str(trial.id),
        shown(trial.best),
        str(trial.steps),
        *(shown(trial.hparams[name]) for name in names),
        trial.state,
    ]
