"""Federations for the page: the rounds in the newest checkpoint of a server, or in its table of results."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.ui.runs import short_id

_ROUND = re.compile(r"round_([0-9]{1,9})")
_TABLE = "rounds.csv"
_LARGEST_STATE = 256 << 20


@dataclass(frozen=True)
class Round:
    """One round of a federation.

    Attributes:
        number: The round, from 1.
        seconds: Seconds since the start, or simulated seconds.
        selected: The clients that were selected.
        reported: The clients whose updates were used.
        faults: Client and kind of every fault.
        metrics: The metrics of the round.
        bytes_down: The bytes that were sent to clients.
        bytes_up: The bytes that clients sent.
        staleness: The largest staleness of an update.
    """

    number: int
    seconds: float = 0.0
    selected: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()
    faults: tuple[tuple[int, str], ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    staleness: int = 0


@dataclass
class Federation:
    """A federation whose files are followed.

    Attributes:
        key: The identifier of the federation in addresses.
        name: The path of its folder below the given folder.
        folder: The folder with the checkpoints of its server, or with `rounds.csv`.
        rounds: Its rounds.
        algorithm: The name of its algorithm; empty if unknown.
        changed_at: When its files were last changed, in seconds since the epoch.
    """

    key: str
    name: str
    folder: Path
    rounds: tuple[Round, ...] = ()
    algorithm: str = ""
    changed_at: float = 0.0
    version: int = 0
    _seen: tuple[Any, ...] | None = None

    @property
    def id(self) -> str:
        """A short form of the key, for addresses."""
        return short_id(self.key)

    def poll(self) -> bool:
        """Read what is new, and return whether anything has changed."""
        source = _newest(self.folder)
        if source is None:
            return False
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
            found = source.stat()
            seen = (str(source), found.st_mtime_ns, found.st_size)
            if seen == self._seen:
                return False
            rounds, algorithm = _of_table(source) if source.name == _TABLE else _of_state(source)
            self._seen, self.rounds, self.algorithm = seen, rounds, algorithm
            self.changed_at = found.st_mtime
            self.version += 1
            return True
        return False

    def metrics(self) -> list[str]:
        """Return the names of all metrics, in order of appearance."""
        return list(dict.fromkeys(name for each in self.rounds for name in each.metrics))

    def faults_by_client(self) -> dict[int, Counter[str]]:
        """Return how often each client had each kind of fault."""
        found: dict[int, Counter[str]] = {}
        for each in self.rounds:
            for client, kind in each.faults:
                found.setdefault(client, Counter())[kind] += 1
        return dict(sorted(found.items()))

    def selections(self) -> dict[int, int]:
        """Return how often each client was selected."""
        return dict(sorted(Counter(client for each in self.rounds for client in each.selected).items()))


def is_federation(names: Collection[str]) -> bool:
    """Return whether a folder with these names has checkpoints or results of a server.

    Example:
        >>> is_federation({"round_12", "clients.db"}), is_federation({"ck_history.jsonl"})
        (True, False)
    """
    return _TABLE in names or any(_ROUND.fullmatch(name) for name in names)


def _newest(folder: Path) -> Path | None:
    """Return the state file of the newest checkpoint, or else the table of rounds."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    numbers = sorted((int(match[1]) for name in names if (match := _ROUND.fullmatch(name))), reverse=True)
    for number in numbers:
        state = folder / f"round_{number}" / "state.json"
        if state.is_file() and not state.is_symlink():
            return state
    table = folder / _TABLE
    return table if table.is_file() and not table.is_symlink() else None


def _of_state(path: Path) -> tuple[tuple[Round, ...], str]:
    if path.stat().st_size > _LARGEST_STATE:
        raise ValueError("too large")
    state = json.loads(path.read_bytes())
    rounds = [_round(_plain(record)) for record in _plain(state["records"])]
    algorithm = state["algorithm"]["name"]
    return tuple(rounds), algorithm if isinstance(algorithm, str) else ""


def _round(record: dict[str, Any]) -> Round:
    metrics = {str(name): float(value) for name, value in record["metrics"].items() if isinstance(value, (int, float))}
    return Round(
        number=int(record["round"]),
        seconds=float(record["elapsed_time"]),
        selected=tuple(int(each) for each in record["selected"]),
        reported=tuple(int(each) for each in record["reported"]),
        faults=tuple((int(each["client_id"]), str(each["kind"])) for each in record["faults"]),
        metrics=metrics,
        bytes_down=int(record["bytes_down"]),
        bytes_up=int(record["bytes_up"]),
        staleness=int(record["staleness"]),
    )


def _plain(value: Any) -> Any:
    """Return a value of a checkpoint's state without its tags for tuples and numbers that JSON does not have."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "$tuple":
            return [_plain(item) for item in content]
        if tag == "$dict":
            return {key if isinstance(key, str) else str(_plain(key)): _plain(item) for key, item in content}
        if tag == "$float":
            return math.nan
    return {key: _plain(item) for key, item in value.items()}


def _of_table(path: Path) -> tuple[tuple[Round, ...], str]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    known = {"round", "elapsed_time", "selected", "reported", "faults", "bytes_down", "bytes_up", "staleness"}
    found = []
    for index, row in enumerate(rows, start=1):
        metrics = {name: number for name, text in row.items() if name not in known | {"backend"}
                   and (number := _number(text)) is not None}  # fmt: skip
        faults = [each.split(" ", 1) for each in (row.get("faults") or "").split("; ") if " " in each]
        found.append(
            Round(
                number=int(_number(row.get("round")) or index),
                seconds=_number(row.get("elapsed_time")) or 0.0,
                selected=_clients(row.get("selected")),
                reported=_clients(row.get("reported")),
                faults=tuple((int(client), kind) for client, kind in faults if client.isdecimal()),
                metrics=metrics,
                bytes_down=int(_number(row.get("bytes_down")) or 0),
                bytes_up=int(_number(row.get("bytes_up")) or 0),
                staleness=int(_number(row.get("staleness")) or 0),
            )
        )
    return tuple(found), ""


def _number(text: Any) -> float | None:
    with suppress(TypeError, ValueError):
        return float(text)
    return None


def _clients(text: str | None) -> tuple[int, ...]:
    return tuple(int(each) for each in (text or "").split() if each.isdecimal())
