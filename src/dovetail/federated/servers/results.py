"""Results of a federation: a table of its rounds, and a figure."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dovetail.errors import UnknownNameError
from dovetail.extras import require
from dovetail.federated.callbacks import ServerCallback
from dovetail.federated.config import ResultsConfig
from dovetail.federated.records import RoundRecord

__all__ = ["Personalized", "WriteResults", "plot_rounds", "rows_of"]

# The columns of a record besides its metrics.
_COLUMNS = tuple(each.name for each in fields(RoundRecord) if each.name != "metrics")

_OF_CLIENTS = ("clients_accuracy", "clients_accuracy_std", "clients_accuracy_worst")


class WriteResults(ServerCallback):
    """Writes `rounds.csv` after every round, `rounds.png` at the end, and `clients.csv` after personalization.

    The table is rewritten each time, under a temporary name first. So it always contains complete rounds, also after
    the server was killed and resumed.

    Args:
        folder: The folder of the files.
        types: The columns. None means all. If clients ran on another backend than the one that was
            requested, a column `backend` is added.

    Example:
        >>> from tempfile import mkdtemp
        >>> from dovetail.federated.servers import fedavg
        >>> folder = mkdtemp()
        >>> written = WriteResults(folder, types=["round", "accuracy"])
        >>> _ = fedavg.Server(rounds=1, total_clients=2, per_round=2, callbacks=[written]).run()
        >>> Path(folder, "rounds.csv").read_text().splitlines()[0]
        'round,accuracy'
    """

    def __init__(self, folder: str | os.PathLike[str], types: Sequence[str] | None = None) -> None:
        self.folder = Path(folder)
        self.types = None if types is None else tuple(types)

    def on_clients_processed(self, server: Any) -> None:
        types = self.types
        if types is not None and "backend" not in types and ran_elsewhere(server.records, server.backend.name):
            types = (*types, "backend")
        self._write("rounds.csv", rows_of(server.records, types))

    def on_clients_personalized(self, server: Any) -> None:
        found = server.personalized
        rows = [
            {"client": client_id, "num_samples": found.num_samples[client_id], **each}
            for client_id, each in found.metrics.items()
        ]
        if rows:
            self._write("clients.csv", rows)

    def on_server_will_close(self, server: Any) -> None:
        if server.records:
            plot_rounds(server.records, self.folder / "rounds.png")

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        # A reader, such as a plot that is refreshed, never sees half a table.
        unfinished = self.folder / f"{name}.tmp"
        unfinished.write_text(text.getvalue(), encoding="utf-8")
        unfinished.replace(self.folder / name)


def with_results(callbacks: Sequence[ServerCallback], config: ResultsConfig) -> list[ServerCallback]:
    """Return the callbacks, and one that writes results if a folder is set and no callback writes them.

    Example:
        >>> [type(it).__name__ for it in with_results([], ResultsConfig(result_path="out"))]
        ['WriteResults']
    """
    found = list(callbacks)
    if config.result_path is not None and not any(isinstance(it, WriteResults) for it in found):
        found.append(WriteResults(config.result_path, columns_of(config)))
    return found


def columns_of(config: ResultsConfig) -> tuple[str, ...]:
    """Return the columns that the settings name, and the columns of the clients' accuracy if it is recorded."""
    added = _OF_CLIENTS if config.record_clients_accuracy else ()
    return (*config.types, *(name for name in added if name not in config.types))


class Personalized(ServerCallback):
    """Stores the metrics of the clients' personalized models in `found`.

    Example:
        >>> from dovetail.federated.servers import fedavg
        >>> kept = Personalized()
        >>> config = {"personalization": {"epochs": 1}, "rounds": 1, "total_clients": 2, "per_round": 2}
        >>> _ = fedavg.Server(callbacks=[kept], **config).run()
        >>> sorted(kept.found)
        ['faults', 'metrics', 'num_samples']
    """

    found: dict[str, Any] | None = None

    def on_clients_personalized(self, server: Any) -> None:
        self.found = server.personalized.to_plain()


def ran_elsewhere(records: Sequence[RoundRecord], requested: str) -> list[RoundRecord]:
    """Return the rounds whose clients ran on another backend than the requested one; `auto` leaves the choice open.

    Example:
        >>> records = [RoundRecord(n, 1.0, (1,), (1,), backend=it) for n, it in [(1, "vectorized"), (2, "sequential")]]
        >>> [record.round for record in ran_elsewhere(records, "vectorized")]
        [2]
    """
    return [record for record in records if record.backend not in ("", requested) and requested != "auto"]


def rows_of(records: Sequence[RoundRecord], types: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rounds, at least one, as rows of a table; a metric that a round does not have is empty.

    None for `types` means all columns.

    Raises:
        UnknownNameError: No round has such a column.
    """
    metrics = list(dict.fromkeys(name for record in records for name in record.metrics))
    known = [*_COLUMNS, *metrics]
    # These two follow from others: a table has them if they are asked for.
    more = _more_columns(records) if types is not None else {}
    for name in types or ():
        # A round without a test has no accuracy; its column in the table is empty.
        if name not in known and name not in ("accuracy", "loss", *_OF_CLIENTS, *more):
            raise UnknownNameError("column of results.types", name, [*known, *more])
    chosen = types or known
    return [
        # A metric of the user with the same name takes precedence over the computed column.
        {name: more[name][row] if name in more and name not in metrics else _cell(record, name) for name in chosen}
        for row, record in enumerate(records)
    ]


def _more_columns(records: Sequence[RoundRecord]) -> dict[str, list[float]]:
    """Return the seconds of each round, and the megabytes that were sent up to its end."""
    times = [0.0, *(record.elapsed_time for record in records)]
    sent = accumulate(record.bytes_down + record.bytes_up for record in records)
    return {
        "round_time": [after - before for before, after in pairwise(times)],
        "comm_overhead": [num_bytes / 2**20 for num_bytes in sent],
    }


def _cell(record: RoundRecord, name: str) -> Any:
    if name not in _COLUMNS:
        return record.metrics.get(name, "")
    value = getattr(record, name)
    if name in ("selected", "reported"):
        return " ".join(map(str, value))
    if name == "faults":
        return "; ".join(f"{fault.client_id} {fault.kind}" for fault in value)
    return value


def plot_rounds(records: Sequence[RoundRecord], path: str | os.PathLike[str]) -> None:
    """Draw accuracy and losses over the rounds into a PNG file."""
    require("matplotlib", "plot")
    # A `Figure` without pyplot needs no display and adds nothing to pyplot's list of open figures.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    accuracies = [name for name in ("accuracy", "clients_accuracy", "clients_accuracy_worst") if _has(records, name)]
    losses = [name for name in ("loss", "train_loss") if _has(records, name)]
    groups = [(title, names) for title, names in (("accuracy", accuracies), ("loss", losses)) if names]
    figure = Figure(figsize=(5 * max(1, len(groups)), 4.2), layout="constrained")
    for place, (title, names) in enumerate(groups, start=1):
        axes = figure.add_subplot(1, len(groups), place)
        for name in names:
            found = [(record.round, record.metrics[name]) for record in records if name in record.metrics]
            axes.plot(*zip(*found, strict=True), marker="o" if len(found) < 30 else "", label=_LABELS[name])
        axes.set(title=title, xlabel="round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    figure.savefig(path, dpi=120)


_LABELS = {
    "accuracy": "global model, server's test data",
    "clients_accuracy": "trained models, mean of clients",
    "clients_accuracy_worst": "trained models, worst tenth",
    "loss": "global model, server's test data",
    "train_loss": "clients, while training",
}


def _has(records: Sequence[RoundRecord], name: str) -> bool:
    return any(name in record.metrics for record in records)
