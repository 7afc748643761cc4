"""Pool of workers that are started once; a free worker receives the next client."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from dovetail.errors import DovetailError
from dovetail.federated.backends.base import Backend, Foresight, Outcome, Work, Worker
from dovetail.federated.messages import Fault, Task

# The number of workers in a row that may fail before one is ready.
_TRIES = 3


class WorkerError(DovetailError):
    """Workers cannot be started, or exit before they are ready."""


@dataclass(eq=False, kw_only=True)
class Seat:
    """The handle of a worker.

    Attributes:
        given: The positions of its unanswered tasks in the round, in order.
        since: The start of the first of these, on the monotonic clock.
        effort: The sum of the cost estimates of its finished tasks in this round.
        seconds: The duration of these tasks.
        is_ready: True if it can receive tasks.
        was_ready: True if it was ever ready.
    """

    given: deque[int] = field(default_factory=deque)
    since: float = 0.0
    effort: float = 0.0
    seconds: float = 0.0
    is_ready: bool = False
    was_ready: bool = False


@dataclass(frozen=True)
class Lost:
    """The message that a worker has exited, with the reason as one sentence."""

    reason: str


News = Outcome | Lost | Literal["ready"]
S = TypeVar("S", bound=Seat)


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
        self._seats: list[S] = []
        self._failures = 0
        self._tasks: list[Task] = []
        self._efforts: list[float] | None = None
        self._waiting = deque[int]()

    @abstractmethod
    def _open(self, worker: Worker) -> None:
        """Prepare to start workers."""

    @abstractmethod
    def _begin(self) -> S:
        """Start a worker, which reports `ready`."""

    @abstractmethod
    def _pack(self, work: Sequence[Work]) -> None:
        """Prepare to send the tasks of one round."""

    @abstractmethod
    def _give(self, seat: S, position: int) -> bool:
        """Send a worker the task at a position of the round; return False if it is dead."""

    @abstractmethod
    def _listen(self, timeout: float | None) -> Iterable[tuple[S, News]]:
        """Yield the reports of workers; wait for the first one, at most for the timeout in seconds."""

    @abstractmethod
    def _end(self, seat: S) -> None:
        """Stop a worker, even while it runs a task."""

    @abstractmethod
    def _size(self) -> int:
        """Return the number of workers."""

    def start(self, worker: Worker) -> None:
        """Start all workers, and wait for the first one to be ready."""
        self._failures = 0
        self._foresight = worker if isinstance(worker, Foresight) else None
        try:
            self._open(worker)
            while not any(seat.is_ready for seat in self._seats):
                self._fill()
                self._heard()
        except BaseException:
            self.close()
            raise

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        """Send tasks to free workers, the longest tasks first if costs are known."""
        self._pack(work)
        self._tasks = [task for task, _ in work]
        self._foresee()
        outcomes: list[Outcome] = []
        try:
            while True:
                self._hand_out()
                self._fill()
                # Workers run while the caller processes these outcomes.
                yield from outcomes
                if not self._waiting and not any(seat.given for seat in self._seats):
                    return
                outcomes = self._heard()
        finally:
            # The caller has stopped early, or an error occurred: these answers are not needed.
            for seat in [seat for seat in self._seats if seat.given]:
                self._dismiss(seat)

    def close(self) -> None:
        while self._seats:
            self._dismiss(self._seats[-1])

    # ------------------------------------------------------------------ inside

    def _fill(self) -> None:
        while len(self._seats) < self._size():
            self._seats.append(self._begin())

    def _foresee(self) -> None:
        """Sort the tasks by cost, the longest first, if all costs are known."""
        worker = self._foresight
        found = [None if worker is None else worker.effort(task) for task in self._tasks]
        efforts = [effort for effort in found if effort is not None]
        positions = range(len(self._tasks))
        if len(efforts) == len(positions):
            self._efforts = efforts
            self._waiting = deque(sorted(positions, key=lambda position: -efforts[position]))
        else:
            self._efforts, self._waiting = None, deque(positions)
        for seat in self._seats:
            seat.effort, seat.seconds = 0.0, 0.0

    def _hand_out(self) -> None:
        while self._waiting and (seat := self._next()) is not None:
            position = self._waiting[0]
            if self._give(seat, position):
                if not seat.given:
                    seat.since = time.monotonic()
                seat.given.append(self._waiting.popleft())
            elif seat.given:
                # It died while running a task, which `_listen` will report.
                seat.is_ready = False
            else:
                self._dismiss(seat)

    def _next(self) -> S | None:
        """Return an idle worker, or else the one that is expected to finish first, if it may have another task."""
        ready = [seat for seat in self._seats if seat.is_ready]
        for seat in ready:
            if not seat.given:
                return seat
        # Without costs, a task could wait behind a long one while other workers are idle.
        if not ready or self._efforts is None:
            return None
        first = min(ready, key=self._remaining)
        return first if len(first.given) <= self.ahead else None

    def _remaining(self, seat: S) -> float:
        """Return the remaining time of a worker: seconds, or costs before any task is finished."""
        assert self._efforts is not None
        effort = sum(self._efforts[position] for position in seat.given)
        # Workers differ in speed, because other programs may use a core.
        known = [seat] if seat.effort else self._seats
        done = sum(each.effort for each in known)
        if not done:
            return effort
        return effort * sum(each.seconds for each in known) / done - (time.monotonic() - seat.since)

    def _heard(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for seat, news in self._listen(self._patience()):
            if news == "ready":
                seat.is_ready = seat.was_ready = True
                self._failures = 0
            elif isinstance(news, Lost):
                if seat.given:
                    outcomes.append(self._failed(seat, "crashed", news.reason))
                    continue
                self._dismiss(seat)
                if not seat.was_ready:
                    self._failures += 1
                    if self._failures == _TRIES:
                        raise WorkerError(f"workers cannot be started: {news.reason}")
            else:
                now, position = time.monotonic(), seat.given.popleft()
                if self._efforts is not None:
                    seat.effort += self._efforts[position]
                    seat.seconds += now - seat.since
                seat.since = now
                outcomes.append(news)
        if self.timeout is not None:
            limit, reason = time.monotonic() - self.timeout, f"no answer after {self.timeout:g} s"
            late = [seat for seat in self._seats if seat.given and seat.since <= limit]
            outcomes += [self._failed(seat, "timed out", reason) for seat in late]
        return outcomes

    def _failed(self, seat: S, kind: Literal["crashed", "timed out"], reason: str) -> Fault:
        """Record the task as failed, stop its worker, and requeue the tasks that the worker had not started."""
        begun, *others = seat.given
        self._waiting.extendleft(reversed(others))
        # While `given` is set: a worker that runs a task does not exit by itself.
        self._dismiss(seat)
        task = self._tasks[begun]
        return Fault(task.client_id, task.round, kind, reason)

    def _patience(self) -> float | None:
        if self.timeout is None:
            return None
        now = time.monotonic()
        return max(0.0, min((seat.since + self.timeout - now for seat in self._seats if seat.given), default=60.0))

    def _dismiss(self, seat: S) -> None:
        self._seats.remove(seat)
        self._end(seat)
