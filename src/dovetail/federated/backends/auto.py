"""Automatic backend: picks `process` or `sequential` by the work of a round and the machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import torch

from dovetail.federated.backends.base import Backend, CostEstimator, Outcome, Work, Worker
from dovetail.federated.backends.processes import Process
from dovetail.federated.backends.sequential import Sequential
from dovetail.federated.messages import Task
from dovetail.runtime.cores import num_cores

_log = logging.getLogger("dovetail.federated")

# Seconds of a step besides its arithmetic, and of one operation, on a current core. A rough estimate is enough: the
# decision differs by a factor of a hundred.
_STEP, _OPERATION = 200e-6, 1e-10
# Forward, and backward twice as much, for a multiplication and an addition each.
_OPERATIONS_PER_WEIGHT = 6
_BATCH_SIZE = 32
# Seconds of work in a round for which processes are worth their start.
_WORTHWHILE = 0.1


class Auto(Backend):
    """Picks a backend when the first round starts, by the work and the machine, and logs the reason.

    `process` if several cores can share a round that is worth it, else `sequential`; on an accelerator `sequential`,
    because the clients share it. `vectorized` is never picked: it has not been measured on an accelerator. What is
    picked depends on the work and the machine, never on how long anything took: a run that is
    repeated has the same backend and the same bits.

    Attributes:
        choice: The picked backend and the reason; empty before the first round. It is also logged.

    Example:
        >>> Auto().choice
        ''
    """

    def __init__(self, num_workers: int | None = None, timeout: float | None = None) -> None:
        super().__init__(num_workers, timeout)
        self.choice = ""
        self._picked: Backend | None = None

    @property
    def ran_on(self) -> str:
        """The backend that did the work of the last `run`; `auto` before the first."""
        return self.name if self._picked is None else self._picked.ran_on

    def start(self, worker: Worker) -> None:
        self._worker = worker
        self._picked = None

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        if self._picked is None and work:
            picked, why = self._pick(work)
            self.choice = f"backend: {picked.name}, because {why}"
            _log.info(self.choice)
            picked.start(self._worker)
            self._picked = picked
        if self._picked is not None:
            yield from self._picked.run(work)

    def close(self) -> None:
        if self._picked is not None:
            self._picked.close()

    def _pick(self, work: Sequence[Work]) -> tuple[Backend, str]:
        alone = Sequential(self.num_workers, self.timeout)
        together = Process(self.num_workers, self.timeout)
        if self.timeout is not None:
            return together, "only another process can be stopped after a timeout"
        if torch.accelerator.is_available():
            return alone, "the clients share an accelerator"
        num_workers = self.num_workers or num_cores()
        if num_workers == 1:
            return alone, "there is one core" if self.num_workers is None else "num_workers is 1"
        if len(work) == 1:
            return alone, "a round has one client"
        worker = self._worker
        costs = [worker.estimate_cost(task) if isinstance(worker, CostEstimator) else None for task, _ in work]
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(work):
            return alone, "the work of the clients cannot be estimated"
        seconds = sum(self._seconds(task, cost) for (task, _), cost in zip(work, known, strict=True))
        about = f"a round of {len(work)} clients is about {seconds:.2g} s of work"
        return (together, about) if seconds >= _WORTHWHILE else (alone, about)

    @staticmethod
    def _seconds(task: Task, samples: float) -> float:
        num_weights = sum(value.numel() for value in task.weights.values())
        batch_size: int = task.config.get("batch_size", _BATCH_SIZE)
        steps = math.ceil(samples / batch_size)
        return steps * _STEP + samples * num_weights * _OPERATIONS_PER_WEIGHT * _OPERATION
