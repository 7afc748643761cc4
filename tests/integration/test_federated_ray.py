"""Clients on a real Ray cluster: one node of two slots on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec

import pytest
from doing import Doing, Fragile, die, done, faults, hang, started, tasks

from dovetail.errors import ConfigError
from dovetail.federated.backends import Backend, Ray, Sequential, Worker
from dovetail.federated.backends.contract import BackendContract
from dovetail.federated.messages import Fault

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    # Ray's own: it leaves processes and files of its nodes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster(light_ray: None) -> Iterator[None]:
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=80_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    processes = [it.process for each in ray._private.worker._global_node.all_processes.values() for it in each]
    yield
    ray.shutdown()
    # Ray ends them, and does not look whether they do.
    for process in processes:
        process.wait(60)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.torture
class TestRay(BackendContract):
    def make(self) -> Backend:
        return Ray(num_workers=2)


def running(worker: Worker, num_workers: int = 2, timeout: float | None = None) -> AbstractContextManager[Backend]:
    return started(Ray(num_workers, timeout), worker)


@pytest.mark.torture
def test_a_client_whose_actor_is_killed_is_left_out_and_the_round_continues() -> None:
    with running(Doing({3: die})) as backend:
        first, second = list(backend.run(tasks(6))), list(backend.run(tasks(2, number=2)))
    (fault,) = faults(first)
    assert (fault.client_id, fault.round, fault.kind) == (3, 1, "crashed")
    assert fault.reason.startswith("its actor was lost (")
    assert done(first).keys() == {1, 2, 4, 5, 6}
    assert done(second).keys() == {1, 2}


@pytest.mark.torture
def test_an_actor_that_dies_between_rounds_loses_no_client() -> None:
    with running(Doing(), num_workers=1) as backend:
        (before,) = done(list(backend.run(tasks(1)))).values()
        os.kill(before["pid"], signal.SIGKILL)
        outcomes = list(backend.run(tasks(2)))
    assert faults(outcomes) == []
    assert before["pid"] not in {it["pid"] for it in done(outcomes).values()}


@pytest.mark.torture
def test_a_client_over_the_timeout_is_left_out() -> None:
    with running(Doing({2: hang}), timeout=3.0) as backend:
        outcomes = list(backend.run(tasks(4)))
    assert faults(outcomes) == [Fault(2, 1, "timed out", "no answer after 3 s")]
    assert done(outcomes).keys() == {1, 3, 4}


@pytest.mark.torture
def test_the_number_of_actors_does_not_exceed_the_slots() -> None:
    with running(Doing(), num_workers=9) as backend:
        assert len({it["pid"] for it in done(list(backend.run(tasks(12)))).values()}) <= 2


@pytest.mark.torture
def test_a_client_that_cannot_be_unpickled_is_rejected_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"the client cannot be received by an actor: .*no such disk here"):
        Ray(1).start(Fragile())


def test_answers_of_ray_actors_equal_serial_ones_bit_for_bit() -> None:
    from dovetail.algorithms import SCAFFOLD, CompositeAlgorithm, Ditto
    from dovetail.clients import simple
    from dovetail.servers import fedavg
    from dovetail.trainers.composable import ComposableTrainer

    def weights(backend: Backend) -> dict[str, bytes]:
        trainer = ComposableTrainer(num_epochs=2, batch_size=16, learning_rate=0.1)
        # What both keep of a client goes with it from actor to actor.
        algorithm = CompositeAlgorithm([SCAFFOLD(), Ditto(personalization_epochs=1)])
        server = fedavg.Server(algorithm=algorithm, rounds=3, total_clients=6, per_round=4, backend=backend)
        server.run(simple.Client(trainer=trainer))
        return {name: value.numpy().tobytes() for name, value in server.weights.items()}

    assert weights(Ray(2)) == weights(Sequential())
