"""Federations for the page: state, rounds and partition, from a server's journal, or its checkpoints or results."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.history.journal import JournalReader, RunState
from dovetail.history.samples import samples_path
from dovetail.ui.runs import short_id
from dovetail.ui.samples import SamplesReader

_ROUND = re.compile(r"round_([0-9]{1,9})")
_TABLE = "rounds.csv"
_JOURNAL = "federation_run.jsonl"
_PARTITION = "partition.json"
_LARGEST_STATE = 256 << 20
_LARGEST_PARTITION = 16 << 20
_MOST_CLIENTS, _MOST_LABELS = 1000, 100


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


@dataclass(frozen=True)
class PartitionTable:
    """The samples of each label at some clients.

    Attributes:
        num_clients: The number of all clients.
        clients: The ids of the rows.
        labels: The names of the columns; one empty name if the labels are unknown.
        counts: The numbers of samples.
    """

    num_clients: int
    clients: tuple[int, ...]
    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per client, for a download."""
        names = [name or "samples" for name in self.labels]
        return [
            {"client": client, **{f"label {name}" if self.labels != ("",) else name: number for name, number in
                                  zip(names, row, strict=True)}}
            for client, row in zip(self.clients, self.counts, strict=True)
        ]  # fmt: skip


class ServerJournal(JournalReader):
    """Reads the journal of a server while it grows.

    Attributes:
        rounds: The rounds by their number.
    """

    rounds: dict[int, Round]

    def clear(self) -> None:
        super().clear()
        self.rounds = {}

    @property
    def is_complete(self) -> bool:
        """Whether the journal has all rounds: not if an earlier version wrote some of them, or a callback failed."""
        resumed = self.start.get("round")
        num_known = len(self.rounds)
        return isinstance(resumed, int) and num_known >= resumed and max(self.rounds, default=0) == num_known

    def take(self, row: dict[str, Any]) -> None:
        super().take(row)
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
            if "start" in row:
                # A killed server repeats the rounds after its newest checkpoint.
                self.rounds = {number: each for number, each in self.rounds.items() if number <= int(row["round"])}
            elif "record" in row:
                found = _round(row["record"])
                self.rounds[found.number] = found


@dataclass
class Federation:
    """A federation whose files are followed.

    Attributes:
        key: The identifier of the federation in addresses.
        name: The path of its folder below the given folder.
        folder: The folder with the journal of its server, its checkpoints, or `rounds.csv`.
        rounds: Its rounds.
        partition: The samples at its clients; None if they are unknown.
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
    partition: PartitionTable | None = None
    journal: ServerJournal = field(init=False)
    samples: SamplesReader = field(init=False)
    _seen: tuple[Any, ...] | None = None
    _seen_partition: tuple[Any, ...] | None = None
    _state: RunState = "unknown"

    def __post_init__(self) -> None:
        self.journal = ServerJournal(self.folder / _JOURNAL)
        self.samples = SamplesReader(samples_path(self.journal.path))

    @property
    def id(self) -> str:
        """A short form of the key, for addresses."""
        return short_id(self.key)

    @property
    def state(self) -> RunState:
        """The state of the server when it was last polled; unknown without a journal."""
        return self._state

    @property
    def error(self) -> str:
        """Why the server failed; empty if it did not."""
        return str(self.journal.end.get("error") or "")

    @property
    def num_planned(self) -> int | None:
        """The planned number of rounds; None if it is unknown."""
        found = self.journal.settings.get("trainer.rounds")
        return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 10**9 else None

    def poll(self) -> bool:
        """Read what is new, and return whether anything has changed."""
        changed = self._poll_journal()
        changed = self._poll_partition() or changed
        # The checkpoint of a server grows with its rounds: it is read only if the journal lacks some.
        if not self.journal.is_complete:
            changed = self._poll_files() or changed
        if changed:
            self.version += 1
        return changed

    def _poll_journal(self) -> bool:
        changed = self.journal.update()
        if changed:
            self.rounds = tuple(self.journal.rounds[number] for number in sorted(self.journal.rounds))
            self._seen = None
            algorithm = self.journal.start.get("algorithm")
            self.algorithm = algorithm if isinstance(algorithm, str) else ""
            self.changed_at = self.journal.last_sign or 0.0
        changed = self.samples.update() or changed
        state = self.journal.state()
        changed, self._state = changed or state != self._state, state
        return changed

    def _poll_partition(self) -> bool:
        path = self.folder / _PARTITION
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError, OverflowError):
            found = path.lstat()
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen_partition or not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_PARTITION:
                return False
            self._seen_partition = seen
            self.partition = _table_of(json.loads(path.read_bytes()))
            return True
        return False

    def _poll_files(self) -> bool:
        source = _newest(self.folder)
        if source is None:
            return False
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError, OverflowError):
            found = source.stat()
            seen = (str(source), found.st_mtime_ns, found.st_size)
            if seen == self._seen:
                return False
            rounds, algorithm = _of_table(source) if source.name == _TABLE else _of_state(source)
            # The journal has more about a round than the table of results.
            known = {**{each.number: each for each in rounds}, **self.journal.rounds}
            self._seen, self.rounds = seen, tuple(known[number] for number in sorted(known))
            self.algorithm = algorithm or self.algorithm
            self.changed_at = found.st_mtime
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
    return _TABLE in names or _JOURNAL in names or any(_ROUND.fullmatch(name) for name in names)


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


def _table_of(plain: Any) -> PartitionTable:
    """Return the partition of a file; raise ValueError if it has another form."""
    clients = tuple(int(each) for each in plain["clients"][:_MOST_CLIENTS])
    labels = tuple(str(each)[:100] for each in plain["labels"][:_MOST_LABELS])
    counts = tuple(tuple(int(number) for number in row[: len(labels)]) for row in plain["counts"][: len(clients)])
    is_whole = len(counts) == len(clients) and all(len(row) == len(labels) for row in counts)
    if not clients or not labels or not is_whole or any(not 0 <= each < 2**53 for row in counts for each in row):
        raise ValueError("expected a row of counts per client")
    return PartitionTable(int(plain["num_clients"]), clients, labels, counts)


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
