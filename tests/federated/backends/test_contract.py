"""Every test of the contract finds a backend that breaks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from dovetail.federated.backends import Backend, Done, Outcome, Sequential, Work, Worker
from dovetail.federated.backends.contract import BackendContract


class Forgetful(Sequential):
    """Has no states."""

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        return super().run([(task, {}) for task, _ in work])


class Sticky(Sequential):
    """Gives a client the seed of the one before."""

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        seeds = [work[max(place - 1, 0)][0].seed for place in range(len(work))]
        return super().run([(replace(task, seed=seed), state) for (task, state), seed in zip(work, seeds, strict=True)])


class Fragile(Sequential):
    """Ends with the first client that fails."""

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        for task, state in work:
            yield Done(*self._worker.work(task, state))


class Greedy(Sequential):
    """Writes into what it is given."""

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        for task, state in work:
            yield from super().run([(task, state)])
            if state:
                state["own"].add_(1)


class Hoarding(Sequential):
    """Answers with what it has answered before."""

    def start(self, worker: Worker) -> None:
        super().start(worker)
        self._known: dict[tuple[int, int], Outcome] = {}

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        for each in work:
            place = (each[0].round, each[0].client_id)
            if place not in self._known:
                (self._known[place],) = super().run([each])
            yield self._known[place]


class Lagging(Sequential):
    """Continues the round that was ended early."""

    def start(self, worker: Worker) -> None:
        super().start(worker)
        self._left: list[Work] = []

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        self._left += work
        while self._left:
            yield from super().run([self._left.pop(0)])


class Single(Sequential):
    """Cannot be closed before it was started."""

    def close(self) -> None:
        del self._worker


BROKEN: list[tuple[type[Backend], str]] = [
    (Forgetful, "test_answers_are_those_of_one_after_the_other"),
    (Sticky, "test_answers_do_not_depend_on_the_order_of_tasks"),
    (Fragile, "test_a_client_that_fails_is_named_and_the_others_are_not_disturbed"),
    (Greedy, "test_what_is_given_is_left_as_it_is"),
    (Hoarding, "test_answers_belong_to_the_caller"),
    (Lagging, "test_a_round_may_be_empty_or_left_early"),
    (Single, "test_it_can_be_closed_twice_and_started_again"),
]


@pytest.mark.parametrize(("kind", "test"), BROKEN, ids=lambda it: getattr(it, "__name__", it))
def test_the_contract_finds_a_broken_backend(kind: type[Backend], test: str) -> None:
    tested = type("Tested", (BackendContract,), {"make": lambda self: kind(), "__test__": False})()
    with pytest.raises((AssertionError, ValueError, AttributeError)):
        getattr(tested, test)()


def test_every_contract_test_fails_for_some_broken_backend() -> None:
    assert {test for _, test in BROKEN} == {name for name in dir(BackendContract) if name.startswith("test_")}
