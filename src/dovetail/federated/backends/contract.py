"""Contract tests for backends: subclass them to test your own."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from dovetail.federated.backends.base import Backend, Done, Outcome, Work
from dovetail.federated.backends.sequential import Sequential
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.states import ClientState
from dovetail.runtime.seeds import derive_seed

_NUM_CLIENTS = 7
_FAILING = 5


class BackendContract:
    """Tests of a `Backend`.

    Subclass it at the top level of a test file, and define `make`. Nothing here imports pytest.

    Attributes:
        tolerance: The largest difference to the answers of `Sequential`; 0 means equal bits.

    Example:
        >>> class TestMyBackend(BackendContract):
        ...     def make(self):
        ...         return Sequential()
        >>> TestMyBackend().test_answers_are_those_of_one_after_the_other()
    """

    __test__: ClassVar[bool] = False
    tolerance: ClassVar[float] = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = cls.make is not BackendContract.make

    def make(self) -> Backend:
        """Return a new backend, every time with the same settings."""
        raise NotImplementedError(f"{type(self).__name__}.make: return the backend to test")

    # ------------------------------------------------------------------ tests

    def test_answers_are_those_of_one_after_the_other(self) -> None:
        """Three rounds with states end as with `Sequential`."""
        with _started(Sequential()) as plain, self._started() as backend:
            theirs, ours = _rounds(plain, 3), _rounds(backend, 3)
        self._assert_same(ours, theirs)

    def test_answers_do_not_depend_on_the_order_of_tasks(self) -> None:
        """Nothing of one client is left for the next."""
        tasks = _tasks(1)
        with self._started() as backend:
            forth = _by_client(backend.run(tasks))
            back = _by_client(backend.run(tasks[::-1]))
            alone = _by_client(outcome for each in tasks for outcome in backend.run([each]))
        self._assert_same(forth, back)
        self._assert_same(forth, alone)

    def test_a_client_that_fails_is_named_and_the_others_are_not_disturbed(self) -> None:
        """The fault has the client, the round, and the last line of the traceback."""
        with self._started() as backend:
            found = _by_client(backend.run(_tasks(4, payload={"failing": _FAILING})))
            whole = _by_client(backend.run(_tasks(4)))
        assert found.pop(_FAILING) == Fault(_FAILING, 4, "crashed", "ValueError: the disk of client 5 is full")
        del whole[_FAILING]
        self._assert_same(found, whole)

    def test_what_is_given_is_left_as_it_is(self) -> None:
        """Weights and states of the caller are the same after a round, and new states come with the answers."""
        tasks = _tasks(1, {client: _state(client, 3) for client in range(1, _NUM_CLIENTS + 1)})
        before = copy.deepcopy(tasks)
        with self._started() as backend:
            found = _by_client(backend.run(tasks))
        for (task, state), (old_task, old_state) in zip(tasks, before, strict=True):
            assert state.keys() == old_state.keys()
            assert state["rounds"] == old_state["rounds"]
            assert torch.equal(state["own"], old_state["own"]), f"the state of client {task.client_id} was changed"
            assert all(torch.equal(value, old_task.weights[name]) for name, value in task.weights.items())
            outcome = found[task.client_id]
            assert isinstance(outcome, Done)
            assert outcome.state["rounds"] == 4

    def test_answers_belong_to_the_caller(self) -> None:
        """A change of an answer changes no other and no later answer."""
        with self._started() as backend:
            first = _by_client(backend.run(_tasks(1)))
            kept = copy.deepcopy(first)
            changed = first.pop(1)
            assert isinstance(changed, Done)
            for value in (*changed.update.delta.values(), changed.state["own"]):
                value.fill_(torch.nan)
            again = _by_client(backend.run(_tasks(1)))
        self._assert_same(again, kept)
        del kept[1]
        self._assert_same(first, kept)

    def test_a_round_may_be_empty_or_left_early(self) -> None:
        """A round that is empty, or stopped after its first outcome, does not change the next round."""
        with self._started() as backend:
            assert list(backend.run([])) == []
            left = iter(backend.run(_tasks(1)))
            next(left)
            # A generator is closed as a server does after an error; another kind of iterator has no `close`.
            getattr(left, "close", lambda: None)()
            found = _by_client(backend.run(_tasks(2)))
        with _started(Sequential()) as plain:
            self._assert_same(found, _by_client(plain.run(_tasks(2))))

    def test_it_can_be_closed_twice_and_started_again(self) -> None:
        """A server that runs a second time starts a closed backend again."""
        backend = self.make()
        backend.close()
        with _started(backend):
            first = _by_client(backend.run(_tasks(1)))
        backend.close()
        with _started(backend):
            self._assert_same(_by_client(backend.run(_tasks(1))), first)

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _started(self) -> Iterator[Backend]:
        with _started(self.make()) as backend:
            yield backend

    def _assert_same(self, ours: dict[int, Outcome], theirs: dict[int, Outcome]) -> None:
        assert ours.keys() == theirs.keys(), "every task has one outcome"
        for client, one in ours.items():
            other = theirs[client]
            assert isinstance(one, Done), one
            assert isinstance(other, Done), other
            assert (one.update.round, one.update.num_samples) == (other.update.round, other.update.num_samples)
            assert one.state["rounds"] == other.state["rounds"]
            assert torch.equal(one.state["own"], other.state["own"])
            for name, value in one.update.delta.items():
                expected = other.update.delta[name]
                torch.testing.assert_close(value, expected, rtol=self.tolerance, atol=self.tolerance)


class _Client:
    """Worker that returns random differences, and counts its tasks in the client state."""

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        if task.payload.get("failing") == task.client_id:
            raise ValueError(f"the disk of client {task.client_id} is full")
        rounds = int(state.get("rounds", 0)) + 1
        own = state["own"] if state else torch.zeros(3, dtype=torch.float64)
        torch.manual_seed(task.seed)
        delta = {name: torch.randn(value.shape) - value / rounds for name, value in task.weights.items()}
        update = Update(task.client_id, task.round, num_samples=task.client_id, delta=delta)
        return update, {"rounds": rounds, "own": own + task.client_id}


@contextmanager
def _started(backend: Backend) -> Iterator[Backend]:
    backend.start(_Client())
    try:
        yield backend
    finally:
        backend.close()


def _rounds(backend: Backend, count: int) -> dict[int, Outcome]:
    states: dict[int, ClientState] = {}
    found: dict[int, Outcome] = {}
    for number in range(1, count + 1):
        found = _by_client(backend.run(_tasks(number, states)))
        states = {client: outcome.state for client, outcome in found.items() if isinstance(outcome, Done)}
    return found


def _tasks(number: int, states: dict[int, ClientState] | None = None, **more: Any) -> Sequence[Work]:
    generator = torch.Generator().manual_seed(number)
    whole = torch.randn(8, 16, generator=generator)
    # A view, an empty tensor and a number: what a model's state may hold besides.
    weights = {"linear": whole[2:6, ::2], "bias": whole[0], "none": torch.empty(0), "scale": torch.tensor(2.0)}
    return [
        (Task(number, client, weights, seed=derive_seed(0, number, client), **more), (states or {}).get(client, {}))
        for client in range(1, _NUM_CLIENTS + 1)
    ]


def _state(client: int, rounds: int) -> ClientState:
    return {"rounds": rounds, "own": torch.full((3,), float(client), dtype=torch.float64)}


def _by_client(outcomes: Any) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    for outcome in outcomes:
        client = outcome.update.client_id if isinstance(outcome, Done) else outcome.client_id
        assert client not in found, f"client {client} has two outcomes"
        found[client] = outcome
    return found
