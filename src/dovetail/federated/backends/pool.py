"""Workers of any kind that are started once and get one client after the other: who is free first gets the next."""

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

__all__ = ["Lost", "News", "Pool", "Seat", "WorkerError"]

# So many workers in a row may fail before they are ready.
_TRIES = 3


class WorkerError(DovetailError):
    """Workers cannot be started, or end before they can do anything."""


@dataclass(eq=False, kw_only=True)
class Seat:
    """A worker, as its backend sees it.

    Attributes:
        given: The positions in the round of what it was given and has not answered, in this order.
        since: When it began with the first of these, on the monotonic clock.
        effort: Of all that it has done in this round, by the efforts of tasks.
        seconds: What that took.
        is_ready: Whether it can be given work.
        was_ready: Whether it ever could.
    """

    given: deque[int] = field(default_factory=deque)
    since: float = 0.0
    effort: float = 0.0
    seconds: float = 0.0
    is_ready: bool = False
    was_ready: bool = False


@dataclass(frozen=True)
class Lost:
    """A worker is no more.

    Attributes:
        reason: One sentence.
    """

    reason: str


News = Outcome | Lost | Literal["ready"]
S = TypeVar("S", bound=Seat)


class Pool(Backend, Generic[S]):
    """Hands out work to workers, and replaces those that die or take too long.

    A kind of worker says how one begins, is given work, is heard and is ended.

    Attributes:
        ahead: How many tasks a worker may have besides the one that it is at work on: whoever has the next one need not
            wait for the server.
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
        """Get ready to begin workers."""

    @abstractmethod
    def _begin(self) -> S:
        """Begin a worker, which says `ready` when it is."""

    @abstractmethod
    def _pack(self, work: Sequence[Work]) -> None:
        """Get ready to give the work of one round."""

    @abstractmethod
    def _give(self, seat: S, position: int) -> bool:
        """Give a worker the work at a position of the round; False if it is dead."""

    @abstractmethod
    def _listen(self, timeout: float | None) -> Iterable[tuple[S, News]]:
        """Wait until a worker has news, or for so many seconds."""

    @abstractmethod
    def _end(self, seat: S) -> None:
        """End a worker, whatever it is doing."""

    @abstractmethod
    def _size(self) -> int:
        """How many workers there are to be."""

    def start(self, worker: Worker) -> None:
        """Begin all workers, and wait for the first of them."""
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
        """Give work to whoever is free, the longest first where that can be known."""
        self._pack(work)
        self._tasks = [task for task, _ in work]
        self._foresee()
        outcomes: list[Outcome] = []
        try:
            while True:
                self._hand_out()
                self._fill()
                # Everybody is at work while the caller looks at what has come in.
                yield from outcomes
                if not self._waiting and not any(seat.given for seat in self._seats):
                    return
                outcomes = self._heard()
        finally:
            # The caller has left, or something broke: nobody waits for these any more.
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
        """Put the longest tasks first, where that can be known."""
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
                # It died at work, of which there will be news.
                seat.is_ready = False
            else:
                self._dismiss(seat)

    def _next(self) -> S | None:
        """Whoever has nothing to do; else whoever is expected to be the first, if that one may have more."""
        ready = [seat for seat in self._seats if seat.is_ready]
        for seat in ready:
            if not seat.given:
                return seat
        # Without foresight, a task could wait behind a long one while others have nothing to do.
        if not ready or self._efforts is None:
            return None
        first = min(ready, key=self._remaining)
        return first if len(first.given) <= self.ahead else None

    def _remaining(self, seat: S) -> float:
        """How long a worker will be at what it was given: seconds, or efforts while nobody knows what these take."""
        assert self._efforts is not None
        effort = sum(self._efforts[position] for position in seat.given)
        # Workers are not equally fast: a core may have other things to do.
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
        """Say what became of a task, and dismiss its worker; what that had not begun is given to another one."""
        begun, *others = seat.given
        self._waiting.extendleft(reversed(others))
        # With what it was given: one that is at work does not leave by itself.
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
