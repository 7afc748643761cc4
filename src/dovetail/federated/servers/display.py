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
        round 1/1  2 clients  accuracy ...
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
        self._print(_line(server.records, server.config, server.backend.name))
        if self._bar is not None:
            self._bar.update(self._task, completed=server.current_round)

    def on_clients_personalized(self, server: Any) -> None:
        found = server.personalized
        words = [f"personalized models of {counted(len(found.metrics), 'client')}"]
        for name in ("accuracy", "loss"):
            if any(name in each for each in found.metrics.values()):
                spread = found.spread(name)
                words += [f"{name} {spread.mean:.4f}", f"worst tenth {spread.worst:.4f}"]
        words += [fault.sentence for fault in found.faults]
        self._print("  ".join(words))

    def _print(self, line: str) -> None:
        """Print a line: a terminal breaks it between words, and a file has it as a whole."""
        assert self._console is not None
        # `markup=False`: the reason of a fault may contain brackets, which rich would read as style.
        self._console.print(line, soft_wrap=not self._console.is_terminal, markup=False)

    def on_server_will_close(self, server: Any) -> None:
        """Stop the progress bar, and print the backend that ran if another one was requested."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elsewhere = ran_elsewhere(server.records, server.backend.name)
        if elsewhere and self._console is not None:
            ran_on = ", ".join(dict.fromkeys(record.backend for record in elsewhere))
            self._print(
                f"backend: {ran_on} in {len(elsewhere)} of {counted(len(server.records), 'round')}, although "
                f"{server.backend.name} was requested"
            )


def _line(records: Sequence[RoundRecord], config: FederatedConfig, backend: str) -> str:
    record, before = records[-1], records[-2].elapsed_time if len(records) > 1 else 0.0
    # An asynchronous round also receives answers to tasks of earlier rounds.
    asked = len(record.selected) if config.server.synchronous else len(record.reported) + len(record.faults)
    kind = "edge server" if config.algorithm.cross_silo else "client"
    last = config.trainer.rounds
    # Padded, so that the lines of a run align.
    words = [f"round {record.round:>{len(str(last))}}/{last}"]
    missing = f"{len(record.reported)} of " if len(record.reported) != asked else ""
    words.append(f"{missing}{counted(asked, kind)}")
    words += [f"{_LABELS[name]} {record.metrics[name]:.4f}" for name in _LABELS if name in record.metrics]
    if record.staleness:
        words.append(f"staleness up to {record.staleness}")
    # The time of this round, as the lines of epochs have the time of their epoch.
    words.append(f"{record.elapsed_time - before:.2f}s")
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
