"""Who gets which task, with workers whose seconds are made up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dovetail.federated.backends import Done, pool
from dovetail.federated.backends.base import Work, Worker
from dovetail.federated.backends.pool import News, Pool, Seat
from dovetail.federated.messages import Task, Update


@dataclass(eq=False, kw_only=True)
class _Rated(Seat):
    seconds_per_effort: float


class _Imagined(Pool[_Rated]):
    """Two workers on a clock that jumps from answer to answer."""

    ahead = 1

    def __init__(self, efforts: Sequence[float], rates: Sequence[float]) -> None:
        super().__init__(len(rates))
        self.now = 0.0
        self._amounts, self._rates = efforts, list(rates)

    def effort(self, task: Task) -> float:
        return self._amounts[task.client_id]

    def work(self, task: Task, state: Any) -> Any:
        raise AssertionError("nobody works")

    def _open(self, worker: Worker) -> None:
        pass

    def _begin(self) -> _Rated:
        return _Rated(seconds_per_effort=self._rates.pop(0), is_ready=True)

    def _pack(self, work: Sequence[Work]) -> None:
        pass

    def _give(self, seat: _Rated, position: int) -> bool:
        return True

    def _listen(self, timeout: float | None) -> Iterable[tuple[_Rated, News]]:
        busy = [seat for seat in self._seats if seat.given]
        if not busy:
            return
        self.now, seat = min(((self._end_of(seat), seat) for seat in busy), key=lambda pair: pair[0])
        yield seat, Done(Update(self._tasks[seat.given[0]].client_id, 1, 1), {})

    def _end_of(self, seat: _Rated) -> float:
        return seat.since + seat.seconds_per_effort * self._amounts[seat.given[0]]

    def _end(self, seat: _Rated) -> None:
        pass

    def _size(self) -> int:
        return 2


def ends(monkeypatch: pytest.MonkeyPatch, efforts: Sequence[float], rates: Sequence[float]) -> dict[int, float]:
    """Return when each client has answered."""
    backend = _Imagined(efforts, rates)
    monkeypatch.setattr(pool.time, "monotonic", lambda: backend.now)
    backend.start(backend)
    work: list[Work] = [(Task(1, number, {}), {}) for number in range(len(efforts))]
    return {outcome.update.client_id: backend.now for outcome in backend.run(work) if isinstance(outcome, Done)}


def test_equal_workers_share_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends(monkeypatch, [1.0] * 8, rates=[1.0, 1.0])
    assert max(found.values()) == 4.0


def test_the_next_task_goes_to_whoever_will_be_free_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is three times as slow as the other, which shows in its first answer."""
    found = ends(monkeypatch, [1.0] * 8, rates=[1.0, 3.0])
    assert len(found) == 8
    assert max(found.values()) == 6.0


def test_what_a_worker_has_done_so_far_says_how_fast_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that can be had: both have something to do until the end."""
    efforts, rates = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0], [1.0, 1.5]
    found = ends(monkeypatch, efforts, rates)
    assert max(found.values()) == pytest.approx(sum(efforts) / sum(1 / rate for rate in rates))
