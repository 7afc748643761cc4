"""Comparison of runs: the settings that differ, runs that differ only in their seed, and tables for download."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Settings that say where a run is stored or how it is shown, not how it trains.
_PLACES = frozenset(("checkpoint_dir", "checkpoint_name", "verbose", "callbacks", "loggers"))
_FORMULA = re.compile(r"^[=+\-@\t\r]")


def varied_settings(settings: Sequence[Mapping[str, Any]], *, all_names: bool = False) -> dict[str, list[Any]]:
    """Return the settings that differ between runs by name: a value per run, None if a run does not have it.

    Args:
        settings: The settings of each run.
        all_names: Return all settings, also equal ones.

    Example:
        >>> varied_settings([{"lr": 0.1, "size": 8}, {"lr": 0.2, "size": 8}])
        {'lr': [0.1, 0.2]}
    """
    names = dict.fromkeys(name for each in settings for name in each if name not in _PLACES)
    columns = {name: [each.get(name) for each in settings] for name in names}
    if all_names:
        return columns
    return {name: column for name, column in columns.items() if len(set(map(_spelled, column))) > 1}


def groups_over_seeds(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the indices of runs whose settings are equal except for seeds, in order of appearance.

    Example:
        >>> groups_over_seeds([{"lr": 0.1, "seed": 1}, {"lr": 0.2, "seed": 1}, {"lr": 0.1, "seed": 2}])
        [[0, 2], [1]]
    """
    found: dict[str, list[int]] = {}
    for index, each in enumerate(settings):
        kept = {name: value for name, value in each.items() if "seed" not in name.lower() and name not in _PLACES}
        found.setdefault(_spelled(kept), []).append(index)
    return list(found.values())


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header. Text that a spreadsheet would run as a formula gets an apostrophe.

    Example:
        >>> print(as_csv([{"name": "=1+1", "loss": -0.5}]), end="")
        name,loss
        '=1+1,-0.5
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_safe(name) for name in names])
    writer.writerows([[_safe(row.get(name, "")) for name in names] for row in rows])
    return text.getvalue()


def as_json(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as strict JSON; NaN and infinities become text."""
    return json.dumps([{name: _strict(value) for name, value in row.items()} for row in rows], indent=1)


def _safe(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, (list, tuple, dict)):
        value = json.dumps(value, default=str)
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _strict(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str, list, dict)) else str(value)
