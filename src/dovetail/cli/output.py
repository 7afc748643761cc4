"""Output of commands: tables for people and JSON for programs; and options that commands share."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dovetail.printing import printable
from dovetail.units import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dovetail.search.records import ExperimentRecord, JobRecord, TrialRecord
    from dovetail.search.store import Store

EXIT_CODES = (
    "Exit codes: 0 success; 1 error, explained in one sentence; 2 wrong usage; 3 the experiment or job ended in ERROR; "
    "130 interrupted, paused or canceled."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", exists=True, dir_okay=False)]
ContextDir = Annotated[
    Path, typer.Argument(metavar="CONTEXT_DIR", help="The folder with the code.", exists=True, file_okay=False)
]
FollowLog = Annotated[bool, typer.Option("--follow", "-f", help="Continue printing until it ends.")]
Home = Annotated[
    Path | None,
    typer.Option(
        "--home", envvar="DOVETAIL_HOME", metavar="DIR", help="The folder of experiments.", show_default=".dovetail"
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="DOVETAIL_STORE",
        metavar="URL",
        help="A database server.",
        show_default="a file in the folder",
    ),
]

_STYLES = {
    "ACTIVE": "cyan",
    "RUNNING": "cyan",
    "COMPLETED": "green",
    "ERROR": "red",
    "INVALID_HP": "red",
    "PAUSED": "yellow",
    "CANCELED": "yellow",
    "WAITING": "yellow",
    "STOPPED": "bright_black",
}


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Print text that may come from a file; only its line breaks have an effect."""
    for line in text.split("\n"):
        print_prose(line, to_stderr=to_stderr)


def print_prose(text: str, first: str = "", *, to_stderr: bool = False) -> None:
    """Print a text behind a prefix. A terminal shows whole words: further lines are indented like the first one.

    Args:
        text: The text, which may come from a file; in a pipe it is one line.
        first: The prefix of the first line.
        to_stderr: Print to stderr instead of stdout.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    text = printable(text)
    if stream.isatty():
        indent = " " * len(first)
        text = "\n".join(_whole_words(text, indent, indent))[len(first) :]
    print(f"{first}{text}", file=stream, flush=True)


def print_command(command: str) -> None:
    """Print a shell command; on a terminal a long one has line breaks that a shell accepts."""
    lines = _whole_words(command, "  ", "    ", spare=2) if sys.stdout.isatty() else [f"  {command}"]
    print(" \\\n".join(lines))


def _whole_words(text: str, first: str, others: str, spare: int = 0) -> list[str]:
    """Return a text in lines of the terminal's width; names with a hyphen, such as paths, are not broken."""
    width = max(console().width - spare, len(others) + 20)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    ) or [first]


def open_store(home: Path | None, url: str | None, made_by: str = "experiment create") -> Store:
    """Return the store that a command reads; raise, without creating a folder, if there is none.

    Args:
        home: The folder of experiments; None means `DOVETAIL_HOME`, or else `.dovetail`.
        url: A database server; None means the file in the folder.
        made_by: The command that creates the requested kind of record.

    Raises:
        ExperimentError: There is no store.
    """
    from dovetail.search.records import ExperimentError
    from dovetail.search.store import Store, home_directory

    folder = home_directory(home)
    # A command that only reads must not create an empty store in the wrong folder.
    if url is None and not (folder / "store.db").exists():
        what = made_by.partition(" ")[0]
        raise ExperimentError(
            f"there are no {what}s in {folder}: create one with 'dovetail {made_by}', or give another --home"
        )
    return Store.open(home, url)


def completion(folders: str, prefix: str = "") -> Callable[[typer.Context, str], list[str]]:
    """Return a function that completes the numbers of experiments, trials or jobs from the names of their folders.

    Opening the store would take too long for a shell. `folders` is a pattern in the folder of experiments, and `prefix`
    is the part of the names before the number.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from dovetail.search.store import home_directory

        numbers = {path.name.removeprefix(prefix) for path in home_directory(ctx.params.get("home")).glob(folders)}
        return sorted((each for each in numbers if each.isdecimal() and each.startswith(incomplete)), key=int)

    return complete


def console() -> Console:
    """Return the console for tables; in a pipe lines are not shortened."""
    from rich.console import Console

    # Rich assumes 80 columns for a pipe, and would cut the cells that a script reads.
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)


def print_json(value: Any) -> None:
    """Print strict JSON, in ASCII."""
    # DEL is the one control character that JSON does not escape.
    print(json.dumps(plain(value), indent=2).replace("\x7f", "\\u007f"))


def plain(value: Any) -> Any:
    """Return values in a form that strict JSON can represent: NaN, infinities and other objects become strings.

    Example:
        >>> plain({"loss": float("nan"), "directory": Path("runs")})
        {'loss': 'nan', 'directory': 'runs'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat(timespec="seconds")
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def fit_columns(
    cells: list[dict[str, str]], width: int, dropped: Iterable[str], least: Mapping[str, int] | None = None
) -> list[dict[str, str]]:
    """Return the cells of a table without the columns that a terminal has no room for.

    Args:
        cells: The cells of each row, by heading; all rows have the same headings.
        width: The columns of the terminal.
        dropped: The headings that may be left out, the least important first.
        least: The width of columns that can be shortened, by heading.

    Example:
        >>> fit_columns([{"name": "best", "size": "12 MB", "loss": "0.5"}], 16, ["size"])
        [{'name': 'best', 'loss': '0.5'}]
    """
    for name in dropped:
        if table_width(cells, least) <= width:
            break
        cells = [{heading: cell for heading, cell in row.items() if heading != name} for row in cells]
    return cells


def table_width(cells: Sequence[Mapping[str, str]], least: Mapping[str, int] | None = None) -> int:
    """Return the columns of the terminal that a table needs; see `fit_columns`."""
    columns = [(heading, *(row[heading] for row in cells)) for heading in (cells[0] if cells else ())]
    natural = [(least or {}).get(it[0]) or max(len(printable(cell)) for cell in it) for it in columns]
    # Every column has a space on both sides and a line.
    return sum(natural) + 3 * len(natural) + 1


# The one column that gives way in a narrow terminal has at least this width.
_LEAST_WIDTH = 8


def make_table(
    *columns: str,
    numbers: Iterable[str] = (),
    long: str = "",
    rows: Iterable[Sequence[str]] = (),
    wrap: bool = True,
    width: int | None = None,
) -> Table:
    """Return a table of plain text; markup and control characters are shown and have no effect.

    Args:
        columns: The headings.
        numbers: The headings of columns with numbers.
        long: The heading of the one column that is shortened in a narrow terminal.
        rows: The cells.
        wrap: Whether this column is wrapped to several lines; otherwise it is cut.
        width: The columns of the terminal; None measures it.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    numbers, rows = set(numbers), list(rows)
    table = Table(box=box.ROUNDED)
    widths = [max(len(printable(it)) for it in (name, *(row[at] for row in rows))) for at, name in enumerate(columns)]
    # Every column has a space on both sides and a line.
    left = (width or console().width) - sum(widths) - 3 * len(widths) - 1
    for name, natural in zip(columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        # Otherwise a narrow terminal cuts numbers and states, too.
        most = max(natural + min(left, 0), _LEAST_WIDTH) if name == long else None
        keeps = name != long or not wrap
        # A name without spaces is shown as a whole, too.
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if keeps else "fold"
        table.add_column(Text(printable(name)), justify=justify, no_wrap=keeps, overflow=overflow, max_width=most)
    for row in rows:
        # `Text` objects, because rich would read brackets in a plain string as markup.
        table.add_row(*(Text(printable(cell), style=_STYLES.get(cell.partition(" ")[0], "")) for cell in row))
    return table


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one pair per line; a terminal breaks long values between words."""
    from rich.text import Text

    escaped = {printable(name): printable(value) for name, value in facts.items()}
    screen, width = console(), max(map(len, escaped))
    for name, value in escaped.items():
        style = _STYLES.get(value.partition(" ")[0].rstrip(":"), "")
        indent = " " * (width + 2)
        if sys.stdout.isatty():
            value = "\n".join(_whole_words(value, indent, indent)).lstrip()
        screen.print(Text.assemble((name.ljust(width), "bold"), "  ", (value, style)), soft_wrap=True)


def moment(time: datetime | None) -> str:
    """Return a time in the local time zone, to the minute."""
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M")


def bytes_text(count: int) -> str:
    """Return a number of bytes in a readable unit.

    Example:
        >>> bytes_text(12), bytes_text(1_500_000)
        ('12 B', '1.5 MB')
    """
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def hparams_text(hparams: Mapping[str, Any]) -> str:
    """Return hyperparameters in one line; of dotted names only the last part is shown.

    Example:
        >>> hparams_text({"lr": 0.0123456, "model": {"depth": 2}})
        'lr 0.01235, depth 2'
    """
    from dovetail.search.charts import shown
    from dovetail.search.report import flat

    return ", ".join(f"{name.rpartition('.')[2]} {shown(value)}" for name, value in flat(hparams).items())


def state_text(record: ExperimentRecord) -> str:
    """Return the state of an experiment, a note if it has no runner, and its number of warnings."""
    notes = ["no runner"] if record.state == "ACTIVE" and not record.is_running else []
    notes += [counted(len(record.warnings), "warning")] if record.warnings else []
    return f"{record.state} ({', '.join(notes)})" if notes else record.state


def describe_experiment(record: ExperimentRecord, *, whole: bool = False) -> dict[str, Any]:
    """Return the `--json` output of an experiment; `whole` adds its configuration and trials."""
    best = record.best_trial
    described: dict[str, Any] = {
        **_fields(record, "id", "name", "state", "is_running", "reason"),
        "searcher": record.config["searcher"].get("name"),
        **metric_fields(record),
        **_fields(record, "smaller_is_better"),
        "num_trials": len(record.trials),
        "best_trial_id": best and best.id,
        "best": best and best.best,
        **_fields(record, "created", "ended", "directory", "warnings"),
    }
    if whole:
        described |= {"config": record.config, "trials": [describe_trial(trial, record) for trial in record.trials]}
    return described


def metric_fields(record: ExperimentRecord) -> dict[str, Any]:
    """Return the `--json` output of the metric that compares trials; it may be the first reported metric."""
    return {"metric": record.metric or None, "is_first_metric": not record.config["searcher"].get("metric")}


def describe_trial(record: TrialRecord, experiment: ExperimentRecord, *, whole: bool = False) -> dict[str, Any]:
    """Return the `--json` output of a trial; `whole` adds every value of its metric."""
    return {
        **_fields(record, "id", "experiment_id", "state", "reason", "hparams", "best", "best_at", "latest"),
        "batches": record.steps,
        **_fields(record, "progress", "status", "restarts"),
        "source": experiment.source_id(record),
        **_fields(record, "started", "ended", "directory"),
        **({"values": record.values} if whole else {}),
    }


def describe_job(record: JobRecord) -> dict[str, Any]:
    """Return the `--json` output of a job."""
    return _fields(record, "id", "name", "state", "exit_code", "started", "ended", "directory")


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}
