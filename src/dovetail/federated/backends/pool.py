"""Pool of workers that are started once; a free worker receives the next client."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from dovetail.errors import DovetailError
from dovetail.federated.backends.base import Backend, CostEstimator, Outcome, Work, Worker
from dovetail.federated.messages import Fault, Task

# The number of workers in a row that may fail before one is ready.
_TRIES = 3


class WorkerError(DovetailError):
    """Workers cannot be started, or exit before they are ready."""


@dataclass(eq=False, kw_only=True)
class WorkerHandle:
    """The handle of a worker.

    Attributes:
        assigned_tasks: The positions of its unanswered tasks in the round, in order.
        task_started_at: The start of the first of these, on the monotonic clock.
        finished_cost: The sum of the cost estimates of its finished tasks in this round.
        seconds: The duration of these tasks.
        is_ready: True if it can receive tasks.
        was_ready: True if it was ever ready.
    """

    assigned_tasks: deque[int] = field(default_factory=deque)
    task_started_at: float = 0.0
    finished_cost: float = 0.0
    seconds: float = 0.0
    is_ready: bool = False
    was_ready: bool = False


@dataclass(frozen=True)
class LostWorker:
    """The message that a worker has exited, with the reason as one sentence."""

    reason: str


WorkerReport = Outcome | LostWorker | Literal["ready"]
S = TypeVar("S", bound=WorkerHandle)


class Pool(Backend, Generic[S]):
    """Distributes tasks to workers, and replaces workers that die or take too long.

    A subclass defines how a worker is started, receives tasks, reports and is stopped.

    Attributes:
        ahead: The number of tasks that a worker may have besides the running one, so that it need not wait for the
            server.
    """

    ahead = 0

    def __init__(self, num_workers: int | None = None, timeout: float | None = None) -> None:
        super().__init__(num_workers, timeout)
        self._handles: list[S] = []
        self._failures = 0
        self._tasks: list[Task] = []
        self._costs: list[float] | None = None
        self._waiting = deque[int]()

    @abstractmethod
    def _open(self, worker: Worker) -> None:
        """Prepare to start workers."""

    @abstractmethod
    def _start_worker(self) -> S:
        """Start a worker, which reports `ready`."""

    @abstractmethod
    def _pack(self, work: Sequence[Work]) -> None:
        """Prepare to send the tasks of one round."""

    @abstractmethod
    def _send_task(self, handle: S, position: int) -> bool:
        """Send a worker the task at a position of the round; return False if it is dead."""

    @abstractmethod
    def _receive_reports(self, timeout: float | None) -> Iterable[tuple[S, WorkerReport]]:
        """Yield the reports of workers; wait for the first one, at most for the timeout in seconds."""

    @abstractmethod
    def _stop_worker(self, handle: S) -> None:
        """Stop a worker, even while it runs a task."""

    @abstractmethod
    def _size(self) -> int:
        """Return the number of workers."""

    def start(self, worker: Worker) -> None:
        """Start all workers, and wait for the first one to be ready."""
        self._failures = 0
        self._cost_estimator = worker if isinstance(worker, CostEstimator) else None
        try:
            self._open(worker)
            while not any(handle.is_ready for handle in self._handles):
                self._start_missing_workers()
                self._collect_outcomes()
        except BaseException:
            self.close()
            raise

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        """Send tasks to free workers, the longest tasks first if costs are known."""
        self._pack(work)
        self._tasks = [task for task, _ in work]
        self._sort_tasks()
        outcomes: list[Outcome] = []
        try:
            while True:
                # Work first, new workers second: starting one takes longer than sending a task.
                self._distribute_tasks()
                self._start_missing_workers()
                # Workers run while the caller processes these outcomes.
                yield from outcomes
                if not self._waiting and not any(handle.assigned_tasks for handle in self._handles):
                    return
                outcomes = self._collect_outcomes()
        finally:
            # The caller has stopped early, or an error occurred: these answers are not needed.
            for handle in [handle for handle in self._handles if handle.assigned_tasks]:
                self._remove_worker(handle)

    def close(self) -> None:
        while self._handles:
            self._remove_worker(self._handles[-1])

    # ------------------------------------------------------------------ inside

    def _start_missing_workers(self) -> None:
        while len(self._handles) < self._size():
            self._handles.append(self._start_worker())

    def _sort_tasks(self) -> None:
        """Sort the tasks by cost, the longest first, if all costs are known."""
        worker = self._cost_estimator
        found = [None if worker is None else worker.estimate_cost(task) for task in self._tasks]
        costs = [cost for cost in found if cost is not None]
        positions = range(len(self._tasks))
        if len(costs) == len(positions):
            self._costs = costs
            self._waiting = deque(sorted(positions, key=lambda position: -costs[position]))
        else:
            self._costs, self._waiting = None, deque(positions)
        for handle in self._handles:
            handle.finished_cost, handle.seconds = 0.0, 0.0

    def _distribute_tasks(self) -> None:
        while self._waiting and (handle := self._next()) is not None:
            position = self._waiting[0]
            if self._send_task(handle, position):
                if not handle.assigned_tasks:
                    handle.task_started_at = time.monotonic()
                handle.assigned_tasks.append(self._waiting.popleft())
            elif handle.assigned_tasks:
                # It died while running a task, which `_receive_reports` will report.
                handle.is_ready = False
            else:
                self._remove_worker(handle)

    def _next(self) -> S | None:
        """Return an idle worker, or else the one that is expected to finish first, if it may have another task."""
        ready = [handle for handle in self._handles if handle.is_ready]
        for handle in ready:
            if not handle.assigned_tasks:
                return handle
        # Without costs, a task could wait behind a long one while other workers are idle.
        if not ready or self._costs is None:
            return None
        first = min(ready, key=self._remaining)
        return first if len(first.assigned_tasks) <= self.ahead else None

    def _remaining(self, handle: S) -> float:
        """Return the remaining time of a worker: seconds, or costs before any task is finished."""
        assert self._costs is not None
        cost = sum(self._costs[position] for position in handle.assigned_tasks)
        # Workers differ in speed, because other programs may use a core.
        known = [handle] if handle.finished_cost else self._handles
        done = sum(each.finished_cost for each in known)
        if not done:
            return cost
        return cost * sum(each.seconds for each in known) / done - (time.monotonic() - handle.task_started_at)

    def _collect_outcomes(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for handle, report in self._receive_reports(self._patience()):
            if report == "ready":
                handle.is_ready = handle.was_ready = True
                self._failures = 0
            elif isinstance(report, LostWorker):
                if handle.assigned_tasks:
                    outcomes.append(self._failed(handle, "crashed", report.reason))
                    continue
                self._remove_worker(handle)
                if not handle.was_ready:
                    # Counts workers in a row that never became ready, which a replacement would repeat without end.
                    self._failures += 1
                    if self._failures == _TRIES:
                        raise WorkerError(f"workers cannot be started: {report.reason}")
            else:
                # A worker answers its tasks in the order in which it received them.
                now, position = time.monotonic(), handle.assigned_tasks.popleft()
                if self._costs is not None:
                    handle.finished_cost += self._costs[position]
                    handle.seconds += now - handle.task_started_at
                handle.task_started_at = now
                outcomes.append(report)
        if self.timeout is not None:
            limit, reason = time.monotonic() - self.timeout, f"no answer after {self.timeout:g} s"
            late = [handle for handle in self._handles if handle.assigned_tasks and handle.task_started_at <= limit]
            outcomes += [self._failed(handle, "timed out", reason) for handle in late]
        return outcomes

    def _failed(self, handle: S, kind: Literal["crashed", "timed out"], reason: str) -> Fault:
        """Record the task as failed, stop its worker, and requeue the tasks that the worker had not started."""
        running, *others = handle.assigned_tasks
        # To the front and in their order: they were due before the tasks that still wait.
        self._waiting.extendleft(reversed(others))
        # While `assigned_tasks` is set: a worker that runs a task does not exit by itself.
        self._remove_worker(handle)
        task = self._tasks[running]
        return Fault(task.client_id, task.round, kind, reason)

    def _patience(self) -> float | None:
        if self.timeout is None:
            return None
        now = time.monotonic()
        starts = [handle.task_started_at for handle in self._handles if handle.assigned_tasks]
        return max(0.0, min(starts) + self.timeout - now) if starts else 60.0

    def _remove_worker(self, handle: S) -> None:
        self._handles.remove(handle)
        self._stop_worker(handle)
