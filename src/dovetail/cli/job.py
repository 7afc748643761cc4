"""`dovetail job`: run a script that does not train, with a configuration and a copy of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import (
    EXIT_CODES,
    AsJson,
    Home,
    StoreUrl,
    console,
    describe_job,
    make_table,
    moment,
    print_json,
)

__all__ = ["app"]

app = typer.Typer(help="Run scripts such as batch inference.", no_args_is_help=True, epilog=EXIT_CODES)


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    from dovetail.search.store import home_directory

    folders = (home_directory(ctx.params.get("home")) / "jobs").glob("[0-9]*")
    return sorted((path.name for path in folders if path.name.startswith(incomplete)), key=int)


_Id = Annotated[int, typer.Argument(metavar="ID", help="The job.", autocompletion=_complete)]


@app.command(epilog=EXIT_CODES)
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", exists=True, dir_okay=False)],
    context_dir: Annotated[
        Path, typer.Argument(metavar="CONTEXT_DIR", help="The folder with the code.", exists=True, file_okay=False)
    ] = Path("."),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, such as data.trial_id=3."),
    ] = None,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Run a job to its end, and print what it says."""
    from dovetail.search.jobs import run_job
    from dovetail.search.store import Store

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    record = run_job(Store.open(home, store), config, context_dir, settings or [], say)
    print(f"job {record.id} {record.state}", file=sys.stderr)
    if record.state != "COMPLETED":
        raise typer.Exit(130 if record.state == "CANCELED" else 3)


@app.command("list")
def list_(home: Home = None, store: StoreUrl = None, as_json: AsJson = False) -> None:
    """List all jobs, the oldest first."""
    from dovetail.search.report import duration
    from dovetail.search.store import Store

    records = Store.open(home, store).jobs()
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
def logs(
    id: _Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it is over.")] = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Print what a job has said."""
    from dovetail.cli.follow import print_log
    from dovetail.search.store import Store

    opened = Store.open(home, store)
    record = opened.job(id)
    print_log(
        record.directory / "log.txt", f"job {id}", (lambda: opened.job(id).state != "RUNNING") if follow else None
    )
