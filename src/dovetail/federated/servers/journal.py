"""Journal of a server: its process, settings, rounds, end and partition, for the live page.

The folder of checkpoints, or of results, gets `federation_run.jsonl`, whose lines are those of a run's journal, with a
line per round, and `partition.json`, the samples of each label at each client.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from dovetail.federated.callbacks import ServerCallback
from dovetail.federated.config import FederatedConfig
from dovetail.federated.data.label_counts import LabelCounts
from dovetail.federated.records import RoundRecord
from dovetail.federated.servers.results import WriteResults
from dovetail.history.journal import RunJournal, RunState
from dovetail.history.lines import write_atomically
from dovetail.runtime.signals import Interrupted

JOURNAL = "federation_run.jsonl"
PARTITION = "partition.json"
# A round of more clients names only this many, and a reason has at most this many characters.
_MOST_CLIENTS, _LONGEST_REASON = 10_000, 300
# Settings that are shown even if they have their defaults.
_SHOWN = frozenset(("trainer.rounds", "clients.total_clients", "clients.per_round", "server.random_seed"))


class WriteJournal(ServerCallback):
    """Writes the journal of a server into some folders. A disk that cannot be written never stops the server.

    Args:
        folders: The folders.

    Example:
        >>> from tempfile import mkdtemp
        >>> from dovetail.federated.servers import fedavg
        >>> folder = mkdtemp()
        >>> _ = fedavg.Server(rounds=1, total_clients=2, per_round=2, callbacks=[WriteJournal([Path(folder)])]).run()
        >>> [next(iter(json.loads(line))) for line in Path(folder, JOURNAL).read_text().splitlines()]
        ['dovetail_run', 'start', 'rows', 'end']
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._journals: list[RunJournal] = []

    def on_training_will_start(self, server: Any) -> None:
        self._journals = [RunJournal(folder / JOURNAL) for folder in self.folders]
        facts = {
            "settings": settings_of(server.config),
            "round": len(server.records),
            "algorithm": _title(server),
            "backend": server.backend.name,
        }
        for journal in self._journals:
            journal.start(facts, is_new=not server.records)
        counts = _label_counts(server)
        content = b"" if counts is None else json.dumps(counts.to_plain()).encode()
        for folder in self.folders if content else ():
            with suppress(OSError):
                write_atomically(folder / PARTITION, content)

    def on_clients_processed(self, server: Any) -> None:
        record = round_line(server.records[-1])
        for journal in self._journals:
            journal.add({"rows": len(server.records), "record": record})
            if monotonic() >= journal.sampler.due:
                journal.sampler.sample(array("d"))

    def on_server_will_close(self, server: Any) -> None:
        # The server calls this while an error is on its way.
        error = sys.exc_info()[1]
        state: RunState = "finished"
        if error is not None:
            state = "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
        for journal in self._journals:
            journal.end(state, None if error is None else f"{type(error).__name__}: {error}")
        self._journals = []


def with_journal(callbacks: Sequence[ServerCallback], checkpoint_path: str | None = None) -> list[ServerCallback]:
    """Return the callbacks, and one that writes the journal beside checkpoints and results, if there are any.

    Args:
        callbacks: The callbacks; those that write results have their folders.
        checkpoint_path: The folder of checkpoints; None means that there is none.

    Example:
        >>> [type(it).__name__ for it in with_journal([], "out")]
        ['WriteJournal']
    """
    found = [it.folder for it in callbacks if isinstance(it, WriteResults)]
    if checkpoint_path is not None:
        found.append(Path(checkpoint_path))
    folders = dict.fromkeys(path.absolute() for path in found)
    is_written = any(isinstance(it, WriteJournal) for it in callbacks)
    return list(callbacks) if is_written or not folders else [*callbacks, WriteJournal(list(folders))]


def settings_of(config: FederatedConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults, and the most important ones, by their names.

    Example:
        >>> settings_of(FederatedConfig().with_settings(rounds=3))["trainer.rounds"]
        3
    """
    found, default = dict(_flat(config)), dict(_flat(FederatedConfig()))
    return {name: value for name, value in found.items() if name in _SHOWN or value != default.get(name)}


def round_line(record: RoundRecord) -> dict[str, Any]:
    """Return the record of a round for a line of the journal, with bounded lists."""
    plain = record.to_plain()
    return plain | {
        "selected": plain["selected"][:_MOST_CLIENTS],
        "reported": plain["reported"][:_MOST_CLIENTS],
        "faults": [
            {**fault, "reason": str(fault["reason"])[:_LONGEST_REASON]} for fault in plain["faults"][:_MOST_CLIENTS]
        ],
    }


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if not isinstance(value, Mapping):
        return [(prefix, value if isinstance(value, (bool, int, float, str)) or value is None else str(value)[:300])]
    return [pair for name, each in value.items() for pair in _flat(each, f"{prefix}.{name}" if prefix else str(name))]


def _title(server: Any) -> str:
    """Return the name of the algorithm; a server in another process has only its settings."""
    algorithm = getattr(server, "algorithm", None)
    return str(server.config.algorithm.type) if algorithm is None else str(algorithm.title)


def _label_counts(server: Any) -> LabelCounts | None:
    """Return the samples at each client; None if the data do not know them. Data of the user must not stop the run."""
    found = None
    with suppress(Exception):
        found = server.datasource.label_counts()
    return found
