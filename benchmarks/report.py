"""How every benchmark says what it found: a section of tables, as JSON for `run.py` and as text for whoever waits.

A table has a row per contestant. What was measured of it is a list of samples, one per round; what is shown is their
median, their middle half, and the verdict on the bar, if there is one. The noise is a row as any other: a contestant
against itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = [
    "Curve",
    "Row",
    "Section",
    "Table",
    "cells",
    "certain",
    "header",
    "library",
    "machine",
    "middle_half",
    "parser",
    "ratios",
    "upper_quartile",
    "verdict",
    "without_outlier",
]

_STARTED = time.perf_counter()
# Whether others are at work on this machine, before this begins.
_LOAD = os.getloadavg()[0]


@dataclass(frozen=True)
class Row:
    """One contestant.

    Attributes:
        name: Who.
        samples: What was measured, round by round; none for one that did not take part.
        bar: What is asked for, in the unit of the table; None where nothing is.
        sense: Whether the bar is the most (`"≤"`) or the least (`"≥"`) that is accepted.
        verdict: `"met"`, `"missed"` or `"unclear"`; or, without samples, why there are none.
        cells: What the table's own columns say.
        is_noise: Whether this is the reference against itself.
    """

    name: str
    samples: Sequence[float] = ()
    bar: float | None = None
    sense: str = "≤"
    verdict: str = ""
    cells: Sequence[str] = ()
    is_noise: bool = False

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Table:
    """Rows that can be compared with each other.

    Attributes:
        title: What was trained, or done.
        unit: What the samples are.
        rows: The contestants.
        columns: Headings of the rows' own cells.
        form: How samples are written.
        note: What else there is to know: rounds, noise.
        is_drawn: Whether it has a panel in the figure.
        is_log: Whether that has a logarithmic axis.
    """

    title: str
    unit: str
    rows: Sequence[Row]
    columns: Sequence[str] = ()
    form: str = "{:.3f}"
    note: str = ""
    is_drawn: bool = True
    is_log: bool = False


@dataclass(frozen=True)
class Curve:
    """How one number follows from another.

    Attributes:
        title: What grows.
        x: The number that is set.
        y: The number that is measured.
        xs: The values of `x`.
        ys: For every one of them, the samples of `y`.
    """

    title: str
    x: str
    y: str
    xs: Sequence[float]
    ys: Sequence[Sequence[float]]

    @property
    def lines(self) -> list[tuple[float, float]]:
        """Slope and intercept of the straight line nearest to the samples, round by round."""
        return [statistics.linear_regression(self.xs, column) for column in zip(*self.ys, strict=True)]


@dataclass
class Section:
    """What one script has found.

    Attributes:
        name: Of the script, without its ending.
        title: For the page.
        what: What is compared, in a few sentences.
        tables: The numbers.
        curves: What the figure shows, where it is not the tables.
        command: How it was run.
        date: When.
        seconds: How long it took.
        machine: On what.
        is_quick: Whether it was only to see that it works.
    """

    name: str
    title: str
    what: str
    tables: list[Table] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    command: str = ""
    date: str = ""
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    is_quick: bool = False

    def add(self, table: Table) -> None:
        """Take a table in, and print it.

        What a quick run says of bars means nothing, and neither does what a busy machine misses.
        """
        is_busy = (os.cpu_count() or 1) < 2 * _LOAD
        rows = list(table.rows)
        for place, row in enumerate(rows):
            if row.verdict in ("met", "missed") and self.is_quick:
                rows[place] = replace(row, verdict="unclear")
            elif row.verdict == "missed" and is_busy:
                rows[place] = replace(row, verdict="unclear, under load")
        self.tables.append(replace(table, rows=rows))
        print(_plain(self.tables[-1]), flush=True)

    def save(self, options: argparse.Namespace) -> None:
        """Write everything to the file of `--json`, if one is asked for."""
        self.date, self.seconds = str(date.today()), time.perf_counter() - _STARTED
        self.machine, self.command = machine(), _command()
        if options.json is not None:
            text = json.dumps(_rounded(asdict(self)), indent=1, ensure_ascii=False)
            # Samples stand in a line.
            text = re.sub(r"\[\s+([-+\d.e,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
            options.json.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Section:
        """Read what `save` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        tables = [Table(**{**each, "rows": [Row(**row) for row in each["rows"]]}) for each in found.pop("tables")]
        curves = [Curve(**each) for each in found.pop("curves")]
        return cls(**found, tables=tables, curves=curves)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line that all benchmarks have."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    made.add_argument("--json", type=Path, help="write the section to this file")
    return made


# ------------------------------------------------------------------ samples


def ratios(samples: Iterable[float], reference: Iterable[float]) -> list[float]:
    """Return how many times the reference's every sample is, round by round."""
    return [mine / its for mine, its in zip(samples, reference, strict=True)]


def middle_half(samples: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def upper_quartile(samples: Sequence[float]) -> float:
    """Return what three samples in four do not exceed."""
    return middle_half(samples)[1]


def without_outlier(samples: Sequence[float]) -> list[float]:
    """Return the samples without the one farthest from the median, if it is far out; at most one is left out.

    Far out means more than three times the width of the middle half away from the middle half (Tukey's fences). Fewer
    than five samples are returned as they are: one of four always moves the quartiles.
    """
    kept = list(samples)
    if len(kept) >= 5:
        low, high = middle_half(kept)
        middle, reach = statistics.median(kept), 3 * (high - low)
        farthest = max(kept, key=lambda sample: abs(sample - middle))
        if not low - reach <= farthest <= high + reach:
            kept.remove(farthest)
    return kept


def certain(samples: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the true median with 95 % certainty, by order statistics.

    One outlier is left out. With fewer than six samples no interval of them has this certainty, and the interval is
    that of all samples.
    """
    ordered = sorted(without_outlier(samples))
    reach = math.ceil(0.98 * math.sqrt(len(ordered)))
    middle = (len(ordered) - 1) / 2
    return ordered[max(0, math.floor(middle - reach))], ordered[min(len(ordered) - 1, math.ceil(middle + reach))]


def verdict(samples: Sequence[float], bar: float, sense: str = "≤", noise: float = 0.0) -> str:
    """Say whether a bar is met; one outlier does not change the answer.

    `"unclear"` where the interval of the median reaches over the bar, and, on a machine that is not quiet, where the
    median is no further from the bar than the reference is from itself.
    """
    low, high = certain(samples)
    middle = statistics.median(samples)
    if noise > 0.05 and abs(middle - bar) <= noise * max(abs(middle), abs(bar)):
        return "unclear"
    if sense == "≥":
        low, high, bar = -high, -low, -bar
    return "met" if high <= bar else "missed" if low > bar else "unclear"


# ------------------------------------------------------------------ where it ran


def machine() -> dict[str, Any]:
    """Return what kind of machine this is, and nothing that tells whose."""
    import torch

    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(_LOAD, 1),
    }


def library(package: str) -> str:
    """Return the version of a package; nothing where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {platform.machine()}" if names else platform.machine()


def _command() -> str:
    """How this script was started, without where its outcome goes and without anybody's folders."""
    words, script = sys.argv[1:], Path(sys.argv[0]).name
    kept = []
    while words:
        word = words.pop(0)
        if word == "--json":
            words.pop(0)
        elif not word.startswith("--json="):
            kept.append(".../" + "/".join(Path(word).parts[-3:]) if word.startswith("/") else word)
    return " ".join(["python", f"benchmarks/{script}", *kept])


# ------------------------------------------------------------------ text


def written(row: Row, form: str) -> tuple[str, str]:
    """Return the median of a row and its middle half, as a table shows them."""
    if not row.samples:
        return "", ""
    low, high = middle_half(row.samples)
    return form.format(row.value), f"{form.format(low)} to {form.format(high)}" if len(row.samples) > 1 else ""


def asked(row: Row, form: str) -> str:
    """Return the bar of a row, as a table shows it."""
    return "" if row.bar is None else f"{row.sense} {form.format(row.bar)}"


def header(table: Table) -> list[str]:
    """Return the headings of a table; those without a cell are left out."""
    middle = ["middle half"] if any(len(row.samples) > 1 for row in table.rows) else []
    bars = ["bar"] if any(row.bar is not None for row in table.rows) else []
    verdicts = ["verdict"] if any(row.verdict for row in table.rows) else []
    return ["", table.unit, *middle, *table.columns, *bars, *verdicts]


def cells(row: Row, table: Table) -> list[str]:
    """Return the cells of a row, one per heading."""
    headings = header(table)
    value, spread = written(row, table.form)
    own = [*row.cells, *[""] * (len(table.columns) - len(row.cells))]
    found = [row.name, value]
    if "middle half" in headings:
        found.append(spread)
    found += own
    if "bar" in headings:
        found.append(asked(row, table.form))
    if "verdict" in headings:
        found.append(row.verdict)
    return found


def _plain(table: Table) -> str:
    lines = [header(table), *(cells(row, table) for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(["", table.title, *text, *([table.note] if table.note else [])])


def _rounded(value: Any) -> Any:
    """The same with numbers of six digits: the rest of a clock is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value
