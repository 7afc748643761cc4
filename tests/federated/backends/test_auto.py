"""What `auto` picks, and that it says why."""

from __future__ import annotations

import logging

import pytest
import torch

from dovetail.federated.backends import Auto, Backend, Work, backends
from dovetail.federated.messages import Task, Update
from dovetail.federated.states import ClientState
from dovetail.runtime.cores import num_cores

several_cores = pytest.mark.skipif(num_cores() < 2, reason="this machine has one core")


class Plain:
    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        return Update(task.client_id, task.round, 1), state


class Estimating(Plain):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def estimate_cost(self, task: Task) -> float:
        return self.samples


def round_of(num_clients: int, num_weights: int = 1000) -> list[Work]:
    weights = {"w": torch.zeros(num_weights)}
    return [(Task(1, client, weights), {}) for client in range(1, num_clients + 1)]


def picked(auto: Auto, worker: Plain, work: list[Work]) -> tuple[str, str]:
    """The backend that `auto` would start, and why."""
    auto.start(worker)
    backend, why = auto._pick(work)
    return type(backend).__name__, why


@several_cores
def test_auto_chooses_processes_for_much_work() -> None:
    assert picked(Auto(), Estimating(6000), round_of(10, 100_000)) == (
        "Process",
        "a round of 10 clients is about 4 s of work",
    )


@several_cores
def test_auto_chooses_the_serial_backend_for_little_work() -> None:
    assert picked(Auto(), Estimating(32), round_of(10, 100)) == (
        "Sequential",
        "a round of 10 clients is about 0.002 s of work",
    )


def test_auto_chooses_the_serial_backend_for_one_worker() -> None:
    assert picked(Auto(num_workers=1), Estimating(6000), round_of(10, 100_000)) == (
        "Sequential",
        "num_workers is 1",
    )


@several_cores
def test_auto_chooses_the_serial_backend_for_one_client() -> None:
    assert picked(Auto(), Estimating(6000), round_of(1, 100_000)) == ("Sequential", "a round has one client")


def test_a_timeout_requires_a_process_backend() -> None:
    assert picked(Auto(timeout=10.0), Plain(), round_of(1))[0] == "Process"


def test_auto_logs_its_choice_once(caplog: pytest.LogCaptureFixture) -> None:
    auto = Auto(num_workers=1)
    auto.start(Plain())
    with caplog.at_level(logging.INFO, "dovetail.federated"):
        assert len(list(auto.run(round_of(3)))) == 3
        assert len(list(auto.run(round_of(2)))) == 2
    assert auto.choice == "backend: sequential, because num_workers is 1"
    assert caplog.messages == [auto.choice]


@pytest.mark.parametrize("name", ["auto", "process", "ray", "sequential"])
def test_backends_are_registered_by_name(name: str) -> None:
    backend = backends.get(name)(num_workers=2, timeout=None)
    assert isinstance(backend, Backend)
    assert type(backend).__name__.lower() == name


def test_the_records_name_the_chosen_backend() -> None:
    auto = Auto(num_workers=1)
    auto.start(Plain())
    assert (auto.name, auto.ran_on) == ("auto", "auto")
    list(auto.run(round_of(2)))
    assert auto.ran_on == "sequential"
