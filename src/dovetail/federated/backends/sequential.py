"""Sequential backend: one client after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.federated.backends.base import Backend, Done, Outcome, Work, Worker
from dovetail.federated.messages import Fault, Task


class Sequential(Backend):
    """Runs clients one after the other. It cannot stop a client, so `timeout` has no effect.

    Example:
        >>> Sequential().num_workers is None
        True
    """

    def start(self, worker: Worker) -> None:
        self._worker = worker

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        for each in work:
            yield run_client(self._worker, each)


def run_client(worker: Worker, work: Work) -> Outcome:
    """Return the outcome of one client; its error is a fault and does not end the round."""
    task, state = work
    try:
        return Done(*worker.work(task, state))
    except Exception as error:
        return fault(task, error)


def fault(task: Task, error: Exception) -> Fault:
    """Return the fault of a client's error, with the last line of its traceback."""
    return Fault(task.client_id, task.round, "crashed", f"{type(error).__name__}: {error}")
