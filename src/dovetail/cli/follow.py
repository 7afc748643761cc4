"""Display of a running experiment: a live table on a terminal, lines of text elsewhere; and log files that grow."""

from __future__ import annotations

import codecs
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.cli.output import console, fit_columns, hparams_text, make_table, table_width
from dovetail.errors import ConfigError
from dovetail.printing import printable
from dovetail.search.charts import shown
from dovetail.search.records import ExperimentRecord, TrialRecord
from dovetail.search.report import duration, flat, searched_names
from dovetail.search.reports import shortened
from dovetail.units import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

_POLL_SECONDS = 0.2
_STATUS_WIDTH = 24
# A narrow terminal shows at least this much of the hyperparameters.
_LEAST_HPARAMS = 16


@contextmanager
def watching(seen: ExperimentRecord | None = None) -> Iterator[Callable[[ExperimentRecord], None]]:
    """Yield a function that shows an experiment on stdout; it prints lines about the changes since `seen`."""
    if not sys.stdout.isatty():

        def say(record: ExperimentRecord) -> None:
            nonlocal seen
            for line in changes(seen, record):
                print(printable(line), flush=True)
            seen = record

        yield say
        return

    from rich.live import Live

    screen = console()
    with _stderr_aside() as said, Live(console=screen, auto_refresh=False) as live:

        def draw(record: ExperimentRecord) -> None:
            if text := said():
                screen.print(printable(text.strip(), lines=True), markup=False)
            live.update(trials_view(record, max(3, screen.height - 9), screen.width), refresh=True)

        yield draw


@contextmanager
def _stderr_aside() -> Iterator[Callable[[], str]]:
    """Yield a function that returns new text on stderr, which would otherwise be lost in the live table."""
    if not sys.stderr.isatty():
        yield str
        return
    position = 0
    with tempfile.TemporaryFile() as kept:

        def said() -> str:
            nonlocal position
            # Read at a position, because the file's own position is where the next text is written.
            words = os.pread(kept.fileno(), 1 << 20, position)
            position += len(words)
            return words.decode("utf-8", errors="replace")

        sys.stderr.flush()
        # The descriptor itself is redirected, because child processes and C code write to it without `sys.stderr`.
        terminal = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            sys.stderr.write(said())


def trials_view(record: ExperimentRecord, num_rows: int | None = None, width: int | None = None) -> RenderableType:
    """Return a table of trials below a summary line.

    Args:
        record: The experiment.
        num_rows: How many trials fit: the best, the running and the newest trials are shown. None means all.
        width: The columns of the terminal: parts of the table that do not fit are left out. None means all parts.
    """
    from rich.console import Group
    from rich.text import Text

    trials = record.trials
    if num_rows is not None and len(trials) > num_rows:
        best = record.best_trial
        # The most important trials last, so that the cut below keeps them.
        wanted = sorted(trials, key=lambda it: (it is best, it.state in ("RUNNING", "WAITING"), it.number))
        trials = tuple(sorted(wanted[-num_rows:], key=lambda it: it.number))
    # If no hyperparameter is searched, all of them are shown.
    names = searched_names(record)
    cells = [_cells(trial, names) for trial in trials]
    # Columns that are empty for all trials are left out.
    empty = {
        *(["restarts"] if not any(trial.restarts for trial in trials) else []),
        *(name for name in ("progress", "status") if not any(row[name] for row in cells)),
    }
    cells = [{name: cell for name, cell in row.items() if name not in empty} for row in cells]
    parts = [] if width is None else ["status", "latest", "restarts", "batches", "progress"]
    width = width or console().width
    # Hyperparameters have a column each if they fit; else they are one text, which is shortened.
    split = fit_columns(_split(cells, trials, names), width, parts)
    if split and table_width(split) <= width:
        cells = split
    else:
        cells = fit_columns(cells, width, parts, {"hyperparameters": _LEAST_HPARAMS})
    columns = {name: [row[name] for row in cells] for name in (cells[0] if cells else ())}
    table = make_table(
        *columns,
        numbers=[name for name, column in columns.items() if all(cell[:1] in "–-0123456789" for cell in column)],
        long="hyperparameters",
        rows=[list(row.values()) for row in cells],
        wrap=num_rows is None,
        width=width,
    )
    hidden = len(record.trials) - len(trials)
    lines = [Text(summary(record), style="bold"), table] if trials else [Text(summary(record), style="bold")]
    if hidden:
        lines.append(Text(f"and {hidden} more", style="bright_black"))
    lines += [Text(printable(f"warning: {warning}"), style="yellow") for warning in record.warnings]
    return Group(*lines)


def summary(record: ExperimentRecord) -> str:
    """Return a summary of an experiment in one line, without control characters."""
    counts = Counter(trial.state for trial in record.trials)
    trials = ", ".join(f"{count} {state.lower()}" for state, count in counts.items())
    best, name = record.best_trial, record.metric_label
    parts = [
        f"experiment {record.id} ({record.name}) {record.state}" + (f": {record.reason}" if record.reason else ""),
        counted(len(record.trials), "trial") + (f" ({trials})" if trials else ""),
        *([] if best is None else [f"best {name} {shown(best.best)} (trial {best.id})"]),
        str(duration(record.created, record.ended)),
    ]
    return printable(" · ".join(parts))


def changes(before: ExperimentRecord | None, after: ExperimentRecord) -> list[str]:
    r"""Return one line per change between two records of an experiment; every line starts with its trial.

    Example:
        >>> from datetime import datetime
        >>> config = {"searcher": {"metric": "loss"}}
        >>> trial = TrialRecord(7, 0, 1, "RUNNING", {"lr": 0.1}, Path("."), values={100: 0.5})
        >>> record = ExperimentRecord(1, "demo", "ACTIVE", config, Path("."), datetime(2026, 1, 1), trials=(trial,))
        >>> print(*changes(None, record), sep="\n")
        trial 7 RUNNING: lr 0.1
        trial 7 loss 0.5 after 100 batches
    """
    known = () if before is None else before.warnings
    lines = [f"warning: {warning}" for warning in after.warnings if warning not in known]
    for trial in after.trials:
        old = before.trials[trial.number] if before is not None and trial.number < len(before.trials) else None
        name = f"trial {trial.id}"
        if old is None:
            lines.append(f"{name} RUNNING: {hparams_text(trial.hparams)}")
        lines += [
            f"{name} {after.metric} {shown(value)} after {counted(steps, 'batch', 'batches')}"
            for steps, value in trial.values.items()
            if old is None or steps not in old.values
        ]
        if old is not None and trial.restarts > old.restarts:
            lines.append(f"{name} restarts" + (f": {trial.reason}" if trial.reason else ""))
        if trial.state != ("RUNNING" if old is None else old.state):
            lines.append(f"{name} {trial.state}" + (f": {trial.reason}" if trial.reason else ""))
    return lines


def print_log(path: Path, what: str, is_over: Callable[[], bool] | None = None) -> None:
    """Print a log.

    Args:
        path: The file.
        what: The owner of the log, for the message that there is no log.
        is_over: Follow the log until this function returns True; None means to print only the current content.
    """
    if is_over is None and not path.exists():
        raise ConfigError(f"{what} has no log yet")
    position = 0
    # A terminal would execute control characters in a log; a pipe or a file gets the log unchanged.
    shown_as = partial(printable, lines=True) if sys.stdout.isatty() else str
    # A part of the file may end inside of a character of several bytes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        # Check this before reading, so that everything that was written before the end is printed.
        over = is_over is None or is_over()
        if path.exists():
            with open(path, "rb") as file:
                file.seek(position)
                while chunk := file.read(1 << 16):
                    sys.stdout.write(shown_as(decoder.decode(chunk)))
                    position += len(chunk)
            sys.stdout.flush()
        if over:
            sys.stdout.write(shown_as(decoder.decode(b"", final=True)))
            return
        time.sleep(_POLL_SECONDS)


def _split(cells: list[dict[str, str]], trials: Sequence[TrialRecord], names: set[str]) -> list[dict[str, str]]:
    """Return cells with a column for each searched hyperparameter instead of one text; empty if a heading is taken."""
    found = [flat(trial.hparams) for trial in trials]
    ordered = [name for name in dict.fromkeys(name for each in found for name in each) if name in names]
    headings = [name.rpartition(".")[2] for name in ordered]
    if not ordered or len({*headings, *cells[0]}) < len(headings) + len(cells[0]):
        return []
    split = []
    for row, hparams in zip(cells, found, strict=True):
        own = {heading: shown(hparams.get(name)) for name, heading in zip(ordered, headings, strict=True)}
        before = {name: row[name] for name in ("trial", "state")}
        split.append(before | own | {name: cell for name, cell in row.items() if name != "hyperparameters"})
    return split


def _cells(trial: TrialRecord, names: set[str]) -> dict[str, str]:
    is_at_work = trial.state in ("RUNNING", "WAITING")
    hparams = {name: value for name, value in flat(trial.hparams).items() if not names or name in names}
    return {
        "trial": str(trial.id),
        "state": trial.state,
        "hyperparameters": hparams_text(hparams),
        "progress": f"{trial.progress:.0%}" if trial.progress and is_at_work else "",
        "status": shortened(trial.status, _STATUS_WIDTH) if trial.status and is_at_work else "",
        "batches": str(trial.steps),
        "latest": shown(trial.latest),
        "best": shown(trial.best),
        "restarts": str(trial.restarts),
    }
