"""Assignment of tasks to workers, with simulated durations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from dovetail.federated.backends import Done, pool
from dovetail.federated.backends.base import Work, Worker
from dovetail.federated.backends.pool import Pool, WorkerHandle, WorkerReport
from dovetail.federated.messages import Task, Update


@dataclass(eq=False, kw_only=True)
class _Rated(WorkerHandle):
    seconds_per_cost: float


class _Imagined(Pool[_Rated]):
    """Two workers on a clock that jumps from answer to answer."""

    ahead = 1

    def __init__(self, costs: Sequence[float], rates: Sequence[float]) -> None:
        super().__init__(len(rates))
        self.now = 0.0
        self._amounts, self._rates = costs, list(rates)

    def estimate_cost(self, task: Task) -> float:
        return self._amounts[task.client_id]

    def work(self, task: Task, state: Any) -> Any:
        raise AssertionError("no worker runs")

    def _open(self, worker: Worker) -> None:
        pass

    def _start_worker(self) -> _Rated:
        return _Rated(seconds_per_cost=self._rates.pop(0), is_ready=True)

    def _pack(self, work: Sequence[Work]) -> None:
        pass

    def _send_task(self, handle: _Rated, position: int) -> bool:
        return True

    def _receive_reports(self, timeout: float | None) -> Iterable[tuple[_Rated, WorkerReport]]:
        busy = [handle for handle in self._handles if handle.assigned_tasks]
        if not busy:
            return
        self.now, handle = min(((self._end_of(handle), handle) for handle in busy), key=lambda pair: pair[0])
        yield handle, Done(Update(self._tasks[handle.assigned_tasks[0]].client_id, 1, 1), {})

    def _end_of(self, handle: _Rated) -> float:
        return handle.task_started_at + handle.seconds_per_cost * self._amounts[handle.assigned_tasks[0]]

    def _stop_worker(self, handle: _Rated) -> None:
        pass

    def _size(self) -> int:
        return 2


def ends(monkeypatch: pytest.MonkeyPatch, costs: Sequence[float], rates: Sequence[float]) -> dict[int, float]:
    """Return when each client has answered."""
    backend = _Imagined(costs, rates)
    monkeypatch.setattr(pool.time, "monotonic", lambda: backend.now)
    backend.start(backend)
    work: list[Work] = [(Task(1, number, {}), {}) for number in range(len(costs))]
    return {outcome.update.client_id: backend.now for outcome in backend.run(work) if isinstance(outcome, Done)}


def test_equal_workers_share_equal_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ends(monkeypatch, [1.0] * 8, rates=[1.0, 1.0])
    assert max(found.values()) == 4.0


def test_the_next_task_goes_to_the_worker_that_is_free_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker is three times as slow as the other, which shows in its first answer."""
    found = ends(monkeypatch, [1.0] * 8, rates=[1.0, 3.0])
    assert len(found) == 8
    assert max(found.values()) == 6.0


def test_the_speed_of_a_worker_is_estimated_from_its_finished_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that can be had: both have something to do until the end."""
    costs, rates = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0], [1.0, 1.5]
    found = ends(monkeypatch, costs, rates)
    assert max(found.values()) == pytest.approx(sum(costs) / sum(1 / rate for rate in rates))
