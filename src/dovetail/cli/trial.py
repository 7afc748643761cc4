"""Command `dovetail trial`: inspect one trial of an experiment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.output import (
    EXIT_CODES,
    AsJson,
    FollowLog,
    Home,
    StoreUrl,
    completion,
    console,
    describe_trial,
    hparams_text,
    make_table,
    metric_fields,
    moment,
    open_store,
    plain,
    print_facts,
    print_json,
)
from dovetail.errors import UnknownNameError
from dovetail.units import counted

if TYPE_CHECKING:
    from dovetail.search.reports import RejectedLine

app = typer.Typer(help="Inspect trials, their logs and metrics.", no_args_is_help=True, epilog=EXIT_CODES)


_complete = completion("experiments/*/trials/trial_*", prefix="trial_")
_Id = Annotated[int, typer.Argument(metavar="ID", help="The id of the trial.", autocompletion=_complete)]


@app.command()
def describe(id: _Id, home: Home = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """Show a trial."""
    from dovetail.search.charts import shown
    from dovetail.search.report import duration

    opened = open_store(home, store)
    record = opened.trial(id)
    experiment = opened.experiment(record.experiment_id)
    metric, source = experiment.metric_label, experiment.source_id(record)
    if as_json:
        return print_json({**describe_trial(record, experiment, whole=True), **metric_fields(experiment)})
    return print_facts(
        {
            "trial": f"{record.id} of experiment {record.experiment_id}",
            "state": record.state + (f": {record.reason}" if record.reason else ""),
            "hyperparameters": hparams_text(record.hparams),
            f"best {metric}": shown(record.best)
            + ("" if record.best_at is None else f" after {counted(record.best_at, 'batch', 'batches')}"),
            f"latest {metric}": shown(record.latest),
            "batches": str(record.steps) + ("" if record.progress is None else f" ({record.progress:.0%} done)"),
            **({} if record.status is None else {"status": record.status}),
            "restarts": str(record.restarts),
            **({} if source is None else {"started from": f"a checkpoint of trial {source}"}),
            "started": moment(record.started),
            "time": str(duration(record.started, record.ended)),
            "folder": str(record.directory),
        }
    )


@app.command()
def logs(id: _Id, follow: FollowLog = False, home: Home = None, store: StoreUrl = None) -> None:
    """Print the output of a trial."""
    from dovetail.cli.follow import print_log

    opened = open_store(home, store)
    record = opened.trial(id)

    def is_over() -> bool:
        is_running = opened.experiment(record.experiment_id).is_running
        # Without a runner, the state would stay RUNNING forever after a crash.
        return not is_running or opened.trial(id).state not in ("RUNNING", "WAITING")

    print_log(record.directory / "log.txt", f"trial {id}", is_over if follow else None)


@app.command()
def metrics(
    id: _Id,
    group: Annotated[str | None, typer.Option(help="Show this group only, such as validation.")] = None,
    home: Home = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the metrics that a trial has reported."""
    from dovetail.search.charts import shown
    from dovetail.search.reports import METRICS

    rows, rejected = _reported(open_store(home, store).trial(id).directory / METRICS)
    for line in rejected:
        print(f"{METRICS}, line {line.number}: {line.reason}; the line is ignored", file=sys.stderr)
    groups = {row["group"] for row in rows}
    if group is not None and rows and group not in groups:
        raise UnknownNameError("group", group, groups)
    rows = [row for row in rows if group in (None, row["group"])]
    if as_json:
        return print_json(rows)
    # Lists and texts, which a script may report, are not in the table; JSON contains them.
    names = list(dict.fromkeys(name for row in rows for name, value in row["metrics"].items() if _is_number(value)))
    cells = [
        [row["group"], str(row["batches"]), *(shown(plain(row["metrics"].get(name))) for name in names)] for row in rows
    ]
    return console().print(make_table("group", "batches", *names, numbers=("batches", *names), rows=cells))


def _reported(path: Path) -> tuple[list[dict[str, Any]], list[RejectedLine]]:
    """Return the metrics in a file, sorted by batches, and the lines that are not reports.

    Of two reports with the same group and batch the later one is used.
    """
    from dovetail.search.reports import Reports

    reports = Reports(path)
    found = {
        (row["group"], row["steps_completed"]): {
            "group": row["group"],
            "batches": row["steps_completed"],
            "metrics": row["metrics"],
        }
        for row in reports.read()
        if "group" in row
    }
    return sorted(found.values(), key=lambda row: row["batches"]), reports.rejected


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity")
