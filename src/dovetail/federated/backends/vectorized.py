"""Vectorized backend: all clients of a round train at once, as one model with a leading dimension."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from dovetail.federated.backends.base import Backend, Done, Outcome, Work, Worker
from dovetail.federated.backends.sequential import Sequential, run_client


@runtime_checkable
class FleetWorker(Protocol):
    """A worker that can do the work of several clients at once."""

    def fleet_obstacle(self, work: Sequence[Work]) -> str | None:
        """Return why these clients cannot work as one; None if they can. An empty reason is not reported."""

    def work_as_fleet(self, work: Sequence[Work]) -> list[Done]:
        """Return the answers of clients that work as one, in their order."""


class Vectorized(Backend):
    """Trains the clients of a round as one model with a leading dimension, for accelerators.

    On a CPU, one client after the other is faster; on an accelerator, one kernel replaces thousands of tiny ones.
    Batches of unequal size are padded and masked, and each client has its data in the same order as on other backends.
    Clients that cannot train at once train one after the other: one warning has the reason, and `ran_on` is
    `sequential`.

    Args:
        num_workers: The number of clients in one fleet. None means all clients of a round.
        timeout: Has no effect.

    Example:
        >>> from dovetail.federated.servers import fedavg
        >>> len(fedavg.Server(rounds=1, total_clients=4, per_round=3, backend="vectorized").run())
        1
    """

    def start(self, worker: Worker) -> None:
        """Store the worker."""
        self._worker = worker
        self._reported: set[str] = set()
        self._ran_on: set[str] = set()

    @property
    def ran_on(self) -> str:
        """`vectorized`, or `sequential` if the clients of the last `run` trained alone; both if some fleets did."""
        return " and ".join(sorted(self._ran_on)) or self.name

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        """Do the work of the round, one fleet after the other."""
        self._ran_on = set()
        size = self.num_workers or max(1, len(work))
        for start in range(0, len(work), size):
            yield from self._fleet(work[start : start + size])

    def _fleet(self, work: Sequence[Work]) -> list[Outcome]:
        worker = self._worker
        if not isinstance(worker, FleetWorker):
            reason: str | None = f"{type(worker).__name__} has no method work_as_fleet"
        else:
            try:
                reason = worker.fleet_obstacle(work)
                if reason is None:
                    done = worker.work_as_fleet(work)
                    self._ran_on.add(self.name)
                    return list(done)
            except Exception as error:
                # The error of a client is raised again, with its id, when the clients train one after the other.
                reason = f"training them at once failed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        # One warning per reason and run: a federation has hundreds of rounds.
        if reason and reason not in self._reported:
            self._reported.add(reason)
            warnings.warn(f"clients train one after the other: {reason}", UserWarning, stacklevel=2)
        self._ran_on.add(Sequential().name)
        return [run_client(worker, each) for each in work]
