"""Command `dovetail experiment`: run a hyperparameter search from a file, and inspect its results."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.checkpoint import best_checkpoint
from dovetail.cli.output import (
    EXIT_CODES,
    AsJson,
    ConfigFile,
    ContextDir,
    FollowLog,
    Home,
    StoreUrl,
    completion,
    console,
    describe_experiment,
    describe_trial,
    fit_columns,
    hparams_text,
    make_table,
    metric_fields,
    moment,
    open_store,
    print_facts,
    print_json,
    print_prose,
    state_text,
)
from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.info import TEST_MODE
from dovetail.printing import printable, quiet
from dovetail.units import counted, unit_name

if TYPE_CHECKING:
    from dovetail.search.records import ExperimentRecord
    from dovetail.search.schema import ExperimentConfig
    from dovetail.search.store import Store

app = typer.Typer(help="Create experiments, watch, pause and compare them.", no_args_is_help=True, epilog=EXIT_CODES)

# Trials have 30 seconds to save, and a launcher needs some more.
_SECONDS_TO_LEAVE = 60.0
_SECONDS_TO_APPEAR = 10.0
# In a narrow terminal, the list of experiments has no time if it leaves less than this to their names.
_LEAST_NAME = 20


_Id = Annotated[int, typer.Argument(metavar="ID", help="The experiment.", autocompletion=completion("experiments/*"))]
_Follow = Annotated[bool, typer.Option("--follow/--detach", help="Follow it, or run it in the background.")]


@app.command(epilog=EXIT_CODES)
def create(
    config: ConfigFile,
    context_dir: ContextDir = Path("."),
    follow: _Follow = True,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, such as searcher.max_trials=4."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run trials on a Ray cluster: ray, local or ray://HOST:PORT.")
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Run only the first trial, for one batch.")] = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Run an experiment.

    Ctrl-C pauses it: trials save and exit, and 'experiment resume' continues it.
    """
    from dovetail.search.schema import read_experiment
    from dovetail.search.store import Store

    # `--cluster` last, so that it wins over a setting of the same key.
    overrides = [*(settings or []), *([] if cluster is None else [f"resources.cluster={cluster}"])]
    wanted = read_experiment(config, overrides, context_dir=context_dir)
    if test:
        with warnings.catch_warnings():
            # These warnings were shown when the file was first read.
            warnings.simplefilter("ignore", UserWarning)
            # The file is read a second time, because the test replaces searcher and hyperparameters.
            wanted = read_experiment(config, [*overrides, *_test_settings(wanted)])
    opened = Store.open(home, store)
    record = opened.create_experiment(wanted, config.read_text(encoding="utf-8"), context_dir)
    print(f"created experiment {record.id}", flush=True)
    _run(opened, record, follow or test)


@app.command("list")
def list_(home: Home = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List all experiments, oldest first."""
    from dovetail.search.records import ExperimentError
    from dovetail.search.report import duration

    try:
        records = open_store(home, store).experiments()
    except ExperimentError as error:
        # Without a store there are no experiments: for a program, this is an empty list and not an error.
        return print_json([]) if as_json else print(error, file=sys.stderr)
    if as_json:
        return print_json([describe_experiment(record) for record in records])
    if not records:
        return print("there are no experiments", file=sys.stderr)
    rows = [
        {
            "id": str(record.id),
            "name": record.name,
            "state": state_text(record),
            "trials": str(len(record.trials)),
            "best": _best_cell(record),
            "created": moment(record.created),
            "time": str(duration(record.created, record.ended)),
        }
        for record in records
    ]
    screen, longest = console(), max(len(record.name) for record in records)
    rows = fit_columns(rows, screen.width, ["time"], {"name": min(longest, _LEAST_NAME)})
    cells = [list(row.values()) for row in rows]
    numbers = ("id", "trials", "best", "time")
    return screen.print(make_table(*rows[0], numbers=numbers, long="name", rows=cells))


@app.command()
def describe(id: _Id, home: Home = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show an experiment and its trials."""
    from dovetail.cli.follow import trials_view
    from dovetail.search.report import duration

    record = open_store(home, store).experiment(id)
    if as_json:
        return print_json(describe_experiment(record, whole=True))
    description = record.config.get("description")
    searcher = ", ".join(f"{name} {value}" for name, value in record.config["searcher"].items() if name != "name")
    print_facts(
        {
            "name": record.name,
            **({"description": str(description)} if description else {}),
            "state": state_text(record) + (f": {record.reason}" if record.reason else ""),
            "searcher": f"{record.config['searcher'].get('name')}: {searcher}",
            "created": moment(record.created),
            "time": str(duration(record.created, record.ended)),
            "folder": str(record.directory),
        }
    )
    # The table of trials includes the warnings.
    screen = console()
    screen.print(trials_view(record, width=screen.width))
    return _print_reasons(record)


@app.command()
def logs(
    id: _Id,
    trial: Annotated[int | None, typer.Option(metavar="ID", help="Print the log of this trial.")] = None,
    follow: FollowLog = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Print the log of the runner, or of a trial."""
    from dovetail.cli.follow import print_log

    opened = open_store(home, store)
    record = opened.experiment(id)
    if trial is None:
        path, what = record.directory / "runner.log", f"experiment {id}"
    else:
        path, what = record.trial(trial).directory / "log.txt", f"trial {trial} of experiment {id}"
    begun = time.monotonic()

    def is_over() -> bool:
        now = opened.experiment(id)
        if trial is not None and now.trial(trial).state not in ("RUNNING", "WAITING"):
            return True
        # A runner that was just started may not have written anything yet.
        is_awaited = now.state == "ACTIVE" and time.monotonic() - begun < _SECONDS_TO_APPEAR
        return not now.is_running and not is_awaited

    print_log(path, what, is_over if follow else None)


@app.command()
def pause(id: _Id, home: Home = None, store: StoreUrl = None) -> None:
    """Pause an experiment: its trials save and exit; 'resume' continues it."""
    _send_request(open_store(home, store), id, "pause")


@app.command(epilog=EXIT_CODES)
def resume(id: _Id, follow: _Follow = True, home: Home = None, store: StoreUrl = None) -> None:
    """Continue an experiment that was paused, or whose runner was killed."""
    opened = open_store(home, store)
    record = opened.experiment(id)
    if record.state not in ("ACTIVE", "PAUSED"):
        raise ConfigError(f"experiment {id} is {record.state}: it cannot be resumed")
    if record.is_running:
        raise ConfigError(f"experiment {id} runs already: follow it with 'dovetail experiment logs {id} --follow'")
    _run(opened, record, follow)


@app.command()
def cancel(id: _Id, home: Home = None, store: StoreUrl = None) -> None:
    """Cancel an experiment permanently; its trials save first."""
    _send_request(open_store(home, store), id, "cancel")


@app.command()
def kill(id: _Id, home: Home = None, store: StoreUrl = None) -> None:
    """Kill an experiment permanently, without saving."""
    _send_request(open_store(home, store), id, "kill")


@app.command()
def delete(
    id: _Id,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Delete an experiment with all its files and checkpoints."""
    opened = open_store(home, store)
    record = opened.experiment(id)
    if not yes:
        trials = counted(len(record.trials), "trial")
        question = f"Delete experiment {id} ({printable(record.name)}), its {trials} and all checkpoints?"
        typer.confirm(question, abort=True)
    opened.delete(id)
    print(f"deleted experiment {id}")


@app.command()
def best(
    id: _Id,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print a configuration that repeats this trial.")] = False,
    home: Home = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the best trial."""
    from dovetail.search.charts import shown
    from dovetail.search.report import best_config, to_yaml

    record = open_store(home, store).experiment(id)
    config, trial = best_config(record), record.best_trial
    assert trial is not None
    assert trial.best_at is not None
    checkpoint = best_checkpoint(trial.directory)
    if as_yaml:
        return print(to_yaml(config), end="")
    if as_json:
        return print_json({**describe_trial(trial, record), **metric_fields(record), "checkpoint": checkpoint})
    return print_facts(
        {
            "trial": str(trial.id),
            record.metric_label: f"{shown(trial.best)} after {counted(trial.best_at, 'batch', 'batches')}",
            "hyperparameters": hparams_text(trial.hparams),
            "checkpoint": "none" if checkpoint is None else str(checkpoint),
        }
    )


@app.command()
def report(
    id: _Id,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page.", show_default="report.html in its folder"),
    ] = None,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Write an HTML report about an experiment, which needs no network, and its images."""
    from dovetail.search.report import report as write_report

    opened = open_store(home, store)
    record = opened.experiment(id)
    written = write_report(record, output or opened.folder(id) / "report.html")
    for path in written:
        print(path)
    if len(written) == 1 and any(trial.values for trial in record.trials):
        print("images need matplotlib: pip install 'dovetail[plot]'", file=sys.stderr)


def _best_cell(record: ExperimentRecord) -> str:
    from dovetail.search.charts import shown

    best = shown(record.best_trial and record.best_trial.best)
    # The configuration names no metric, so show its name in the cell.
    return f"{best} {record.metric_label}" if record.first_metric and record.best_trial else best


def _run(store: Store, record: ExperimentRecord, follow: bool) -> None:
    from dovetail.cli.follow import summary, watching
    from dovetail.search.runner import Runner, start_detached

    if not follow:
        process = start_detached(store, record.id)
        return print(f"process {process.pid} runs it; follow it with 'dovetail experiment logs {record.id} --follow'")
    # The record of the start: on a pipe, only later changes are printed.
    with watching(record) as show:
        done = Runner(store, record.id, observer=show).run()
    if not sys.stdout.isatty():
        print(summary(done))
    _show_failures(done)
    if done.state == "PAUSED":
        print(f"continue it with 'dovetail experiment resume {done.id}'", file=sys.stderr)
    if done.state != "COMPLETED":
        raise typer.Exit(3 if done.state == "ERROR" else 130)
    return None


def _print_reasons(record: ExperimentRecord) -> None:
    """Print why trials failed, each reason once with its first trial."""
    # In reverse, so that the first trial of a reason overwrites later ones.
    first = {trial.reason: trial for trial in reversed(record.trials) if trial.state == "ERROR" and trial.reason}
    for reason, trial in sorted(first.items(), key=lambda pair: pair[1].number):
        print_prose(f"trial {trial.id} failed: {reason}")


def _show_failures(record: ExperimentRecord) -> None:
    """Print the first failure and its log file, because many trials often fail for the same reason."""
    failed = [trial for trial in record.trials if trial.state == "ERROR"]
    if failed:
        first = failed[0]
        print_prose(f"trial {first.id} failed: {first.reason}", to_stderr=True)
        log = first.directory / "log.txt"
        print_prose(f"see 'dovetail trial logs {first.id}' for details: {log}", to_stderr=True)


def _send_request(store: Store, experiment_id: int, command: str) -> None:
    """Send a command to the runner, and wait until it is carried out."""
    from dovetail.search.records import OVER
    from dovetail.search.runner import request

    before = store.experiment(experiment_id)
    if before.state in OVER:
        raise ConfigError(f"experiment {experiment_id} is {before.state} already: it cannot {command}")
    record = request(store, experiment_id, command)
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    while record.is_running and time.monotonic() < deadline:
        time.sleep(0.1)
        record = store.experiment(experiment_id)
    if record.is_running:
        return print(f"experiment {experiment_id}: {command} requested; its trials are still exiting")
    # Read again: the runner may have exited while the record was being read.
    return print(f"experiment {experiment_id} is {store.experiment(experiment_id).state}")


def _test_settings(config: ExperimentConfig) -> list[str]:
    """Return the settings of a test: only the searcher's first trial, for one batch and without restarts."""
    from dovetail.config import trial_length
    from dovetail.search.searchers import make_searcher
    from dovetail.search.space import Space

    space = Space(config.hyperparameters)
    optuna = require("optuna", "search")
    with quiet("optuna"):
        nothing_yet = optuna.create_study()
    # The same hyperparameters as trial 0 of the real run.
    first = make_searcher(config.searcher, space, config.seed).suggest(nothing_yet, 0)
    searcher, length = config.raw["searcher"], trial_length(config.raw)
    values: dict[str, Any] = {
        "name": f"{config.name} (test)",
        "hyperparameters": space.hparams({} if first is None else first.params),
        "searcher": {
            "name": "single",
            **{key: searcher[key] for key in ("metric", "smaller_is_better") if key in searcher},
            **({} if length is None else {"max_length": {unit_name(length): length.length}}),
        },
        "environment": {"environment_variables": {**config.environment, TEST_MODE: "1"}},
        "max_restarts": 0,
    }
    # JSON is YAML, in which settings of the command line are written.
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]
