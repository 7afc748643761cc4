"""Workers of any kind that are started once and get one client after the other: who is free gets the next."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
        task: What it is at work on; None for nothing.
        since: When it got that, on the monotonic clock.
        is_ready: Whether it can be given work.
        was_ready: Whether it ever could.
    """

    task: Task | None = None
    since: float = 0.0
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
    """

    def __init__(self, num_workers: int | None = None, timeout: float | None = None) -> None:
        super().__init__(num_workers, timeout)
        self._seats: list[S] = []
        self._failures = 0

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
        """Give a free worker the work at a position of the round; False if it is dead."""

    @abstractmethod
    def _listen(self, seats: Sequence[S], timeout: float | None) -> Iterable[tuple[S, News]]:
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
        waiting = deque(self._ordered(work))
        outcomes: list[Outcome] = []
        try:
            while True:
                self._hand_out(work, waiting)
                self._fill()
                # Everybody is at work while the caller looks at what has come in.
                yield from outcomes
                if not waiting and not any(seat.task for seat in self._seats):
                    return
                outcomes = self._heard()
        finally:
            # The caller has left, or something broke: nobody waits for these any more.
            for seat in [seat for seat in self._seats if seat.task]:
                self._dismiss(seat)

    def close(self) -> None:
        """End all workers."""
        while self._seats:
            self._dismiss(self._seats[-1])

    # ------------------------------------------------------------------ inside

    def _fill(self) -> None:
        while len(self._seats) < self._size():
            self._seats.append(self._begin())

    def _hand_out(self, work: Sequence[Work], waiting: deque[int]) -> None:
        for seat in [seat for seat in self._seats if seat.is_ready and seat.task is None]:
            if not waiting:
                return
            if self._give(seat, waiting[0]):
                seat.task, seat.since = work[waiting.popleft()][0], time.monotonic()
            else:
                self._dismiss(seat)

    def _heard(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for seat, news in self._listen(self._seats, self._patience()):
            task, seat.task = seat.task, None
            if news == "ready":
                seat.is_ready = seat.was_ready = True
                self._failures = 0
            elif isinstance(news, Lost):
                self._dismiss(seat)
                if task is not None:
                    outcomes.append(Fault(task.client_id, task.round, "crashed", news.reason))
                elif not seat.was_ready:
                    self._failures += 1
                    if self._failures == _TRIES:
                        raise WorkerError(f"workers cannot be started: {news.reason}")
            else:
                outcomes.append(news)
        for seat in list(self._seats):
            task = seat.task
            if task is not None and self.timeout is not None and time.monotonic() - seat.since >= self.timeout:
                self._dismiss(seat)
                reason = f"no answer after {self.timeout:g} s"
                outcomes.append(Fault(task.client_id, task.round, "timed out", reason))
        return outcomes

    def _patience(self) -> float | None:
        if self.timeout is None:
            return None
        now = time.monotonic()
        return max(0.0, min((seat.since + self.timeout - now for seat in self._seats if seat.task), default=60.0))

    def _dismiss(self, seat: S) -> None:
        self._seats.remove(seat)
        self._end(seat)

    def _ordered(self, work: Sequence[Work]) -> list[int]:
        positions = list(range(len(work)))
        if self._foresight is not None:
            efforts = [self._foresight.effort(task) for task, _ in work]
            positions.sort(key=lambda position: -efforts[position])
        return positions
