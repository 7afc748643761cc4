"""Command `dovetail job`: run a script that does not train, with a configuration and a copy of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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
    describe_job,
    make_table,
    moment,
    open_store,
    print_json,
)

app = typer.Typer(help="Run scripts such as batch inference.", no_args_is_help=True, epilog=EXIT_CODES)


_MADE_BY = "job run"
_Id = Annotated[int, typer.Argument(metavar="ID", help="The job.", autocompletion=completion("jobs/*"))]


@app.command(epilog=EXIT_CODES)
def run(
    config: ConfigFile,
    context_dir: ContextDir = Path("."),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, such as data.trial_id=3."),
    ] = None,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Run a job until it ends, and print its output."""
    from dovetail.search.jobs import run_job
    from dovetail.search.store import Store

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    record = run_job(Store.open(home, store), config, context_dir, settings or [], say)
    # On stderr, so that stdout has the output of the job alone.
    print(f"job {record.id} {record.state}", file=sys.stderr)
    if record.state != "COMPLETED":
        raise typer.Exit(130 if record.state == "CANCELED" else 3)


@app.command("list")
def list_(home: Home = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List all jobs, oldest first."""
    from dovetail.search.records import ExperimentError
    from dovetail.search.report import duration

    try:
        records = open_store(home, store, _MADE_BY).jobs()
    except ExperimentError as error:
        return print_json([]) if as_json else print(error, file=sys.stderr)
    if as_json:
        return print_json([describe_job(record) for record in records])
    rows = [
        (
            str(record.id),
            record.name,
            record.state,
            "" if record.exit_code is None else str(record.exit_code),
            moment(record.started),
            str(duration(record.started, record.ended)),
        )
        for record in records
    ]
    columns = ("id", "name", "state", "exit code", "started", "time")
    return console().print(make_table(*columns, numbers=("id", "exit code", "time"), long="name", rows=rows))


@app.command()
def logs(id: _Id, follow: FollowLog = False, home: Home = None, store: StoreUrl = None) -> None:
    """Print the output of a job."""
    from dovetail.cli.follow import print_log

    opened = open_store(home, store, _MADE_BY)

    def is_over() -> bool:
        return opened.job(id).state != "RUNNING"

    print_log(opened.job(id).directory / "log.txt", f"job {id}", is_over if follow else None)
