"""All clients of a round at once: one model with a leading dimension."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from dovetail.federated.backends.base import Backend, Done, Outcome, Work, Worker
from dovetail.federated.backends.sequential import Sequential, attempted


@runtime_checkable
class Together(Protocol):
    """A worker that can do the work of several clients at once."""

    def why_alone(self, work: Sequence[Work]) -> str | None:
        """Return what keeps these clients from working as one; None if nothing does."""

    def work_together(self, work: Sequence[Work]) -> list[Done]:
        """Return the answers of clients that work as one, in their order."""


class Vectorized(Backend):
    """Trains the clients of a round as one model with a leading dimension, for accelerators.

    On a processor a client after the other is faster; on an accelerator thousands of tiny kernels become one.
    Clients of unequal size are padded and masked, and each has its data in the same order as elsewhere. What cannot be
    done at once is done one after the other: one warning says why, and `ran_on` is `sequential` then.

    Args:
        num_workers: How many clients make one fleet; None for all of a round.
        timeout: Has no meaning here.

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
        """Do the work of a fleet at a time."""
        self._ran_on = set()
        size = self.num_workers or max(1, len(work))
        for start in range(0, len(work), size):
            yield from self._fleet(work[start : start + size])

    def _fleet(self, work: Sequence[Work]) -> list[Outcome]:
        worker = self._worker
        if not isinstance(worker, Together):
            reason: str | None = f"{type(worker).__name__} works for one client at a time"
        else:
            try:
                reason = worker.why_alone(work)
                if reason is None:
                    done = worker.work_together(work)
                    self._ran_on.add(self.name)
                    return list(done)
            except Exception as error:
                # The error of a client is raised again, with its id, when the clients train one after the other.
                reason = f"together they fail ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        if reason and reason not in self._reported:
            self._reported.add(reason)
            warnings.warn(f"clients train one after the other: {reason}", UserWarning, stacklevel=2)
        self._ran_on.add(Sequential().name)
        return [attempted(worker, each) for each in work]
