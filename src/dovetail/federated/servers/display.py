"""Display of the rounds of a federation in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dovetail.federated.callbacks import ServerCallback
from dovetail.federated.config import FederatedConfig
from dovetail.federated.records import RoundRecord
from dovetail.federated.servers.results import ran_elsewhere
from dovetail.units import counted

__all__ = ["RoundDisplay"]


class RoundDisplay(ServerCallback):
    """Shows a progress bar if the output is a terminal, and prints a line for every round.

    Args:
        console: The console to print to. None means the standard output.

    Example:
        >>> from dovetail.federated.servers import fedavg
        >>> display = RoundDisplay(Console(width=100, force_terminal=False))
        >>> server = fedavg.Server(rounds=1, total_clients=2, per_round=2, callbacks=[display])
        >>> _ = server.run()  # doctest: +ELLIPSIS
        round 1/1  2 of 2 clients  accuracy ...
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._bar: Progress | None = None

    def on_training_will_start(self, server: Any) -> None:
        self._console = self._console or Console(highlight=False)
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("rounds"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[doing]}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=server.config.trainer.rounds, completed=server.current_round, doing=""
            )

    def on_clients_selected(self, server: Any, selected_clients: Sequence[int], **kwargs: Any) -> None:
        if self._bar is not None:
            some = ", ".join(map(str, selected_clients[:8])) + (" …" if len(selected_clients) > 8 else "")
            self._bar.update(self._task, doing=f"clients {some}")

    def on_clients_processed(self, server: Any) -> None:
        assert self._console is not None
        line = _line(server.records[-1], server.config, server.backend.name)
        self._console.print(line, soft_wrap=True, markup=False)
        if self._bar is not None:
            self._bar.update(self._task, completed=server.current_round)

    def on_clients_personalized(self, server: Any) -> None:
        assert self._console is not None
        found = server.personalized
        words = [f"{counted(len(found.metrics), 'client')} for themselves"]
        for name in ("accuracy", "loss"):
            if any(name in each for each in found.metrics.values()):
                spread = found.spread(name)
                words += [f"{name} {spread.mean:.4f}", f"worst tenth {spread.worst:.4f}"]
        words += [fault.sentence for fault in found.faults]
        self._console.print("  ".join(words), soft_wrap=True, markup=False)

    def on_server_will_close(self, server: Any) -> None:
        """Stop the progress bar, and print the backend that ran if another one was requested."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elsewhere = ran_elsewhere(server.records, server.backend.name)
        if elsewhere and self._console is not None:
            ran_on = ", ".join(dict.fromkeys(record.backend for record in elsewhere))
            self._console.print(
                f"backend: {ran_on} in {len(elsewhere)} of {counted(len(server.records), 'round')}, although "
                f"{server.backend.name} was requested",
                soft_wrap=True,
                markup=False,
            )


def _line(record: RoundRecord, config: FederatedConfig, backend: str) -> str:
    # An asynchronous round also receives answers to tasks of earlier rounds.
    asked = len(record.selected) if config.server.synchronous else len(record.reported) + len(record.faults)
    kind = "edge server" if config.algorithm.cross_silo else "client"
    last = config.trainer.rounds
    # Padded, so that the lines of a run align.
    words = [f"round {record.round:>{len(str(last))}}/{last}", f"{len(record.reported)} of {counted(asked, kind)}"]
    words += [f"{_LABELS[name]} {record.metrics[name]:.4f}" for name in _LABELS if name in record.metrics]
    if record.staleness:
        words.append(f"staleness up to {record.staleness}")
    words.append(f"{record.elapsed_time:.2f}s")
    if ran_elsewhere([record], backend):
        words.append(f"on {record.backend}, not {backend}")
    words += [fault.sentence for fault in record.faults]
    return "  ".join(words)


_LABELS = {
    "accuracy": "accuracy",
    "loss": "loss",
    "train_loss": "train loss",
    "clients_accuracy": "clients' accuracy",
    "clients_accuracy_worst": "worst tenth",
}
