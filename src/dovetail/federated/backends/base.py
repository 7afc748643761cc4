"""Interface of backends, which run the work of clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dovetail.errors import expect
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.states import ClientState

# A task, and the state of its client.
Work = tuple[Task, ClientState]


class Worker(Protocol):
    """An object that does the work of any client, such as `dovetail.federated.clients.simple.Client`."""

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        """Return the client's answer and its new state; the arguments are not changed."""


@runtime_checkable
class CostEstimator(Protocol):
    """A worker that can estimate the cost of a task."""

    def estimate_cost(self, task: Task) -> float | None:
        """Return the samples of the client times the epochs of a task. None means that they are not known."""


@dataclass(frozen=True)
class Done:
    """The answer of a client, and its new state."""

    update: Update
    state: ClientState


Outcome = Done | Fault


class Backend(ABC):
    """Runs the work of clients.

    The work depends only on the task, the state and the client's data, so all backends return the same answers.

    Args:
        num_workers: The number of clients that run at the same time, if the backend has a choice. None means the
            default of the backend.
        timeout: Seconds after which a client without an answer is left out, if the backend can stop it. None means no
            limit.

    Raises:
        ConfigError: A number is not positive.
    """

    def __init__(self, num_workers: int | None = None, timeout: float | None = None) -> None:
        expect(num_workers is None or num_workers >= 1, "num_workers", "at least 1, or None for what fits", num_workers)
        expect(timeout is None or timeout > 0, "timeout", "a positive number of seconds, or None", timeout)
        self.num_workers = num_workers
        self.timeout = timeout

    @property
    def name(self) -> str:
        """The name of this backend, as configurations spell it."""
        return type(self).__name__.lower().removesuffix("backend")

    @property
    def ran_on(self) -> str:
        """The name of the backend that did the work of the last `run`; the same one, if it passes no work on."""
        return self.name

    @abstractmethod
    def start(self, worker: Worker) -> None:
        """Prepare for the first round; called once, and again after `close`."""

    @abstractmethod
    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        """Do the work of one round, and yield the outcomes in any order.

        An error of a client becomes a `Fault` with its id; the other clients continue.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release all resources; also called after an error, and possibly several times."""
