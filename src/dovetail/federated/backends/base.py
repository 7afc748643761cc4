"""Where clients run: the one interface of all backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dovetail.errors import expect
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.states import ClientState

__all__ = ["Backend", "Done", "Foresight", "Outcome", "Work", "Worker"]

# A task, and the state of its client.
Work = tuple[Task, ClientState]


class Worker(Protocol):
    """Whoever can do the work of any client: `dovetail.federated.clients.simple.Client`."""

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        """Return the client's answer, and its new state; what is given is left as it is."""


@runtime_checkable
class Foresight(Protocol):
    """A worker that may know how much there is to do before it is done."""

    def effort(self, task: Task) -> float | None:
        """Return how many samples a task goes through: those of the client, times its epochs; None if not known."""


@dataclass(frozen=True)
class Done:
    """A task that was done.

    Attributes:
        update: The client's answer.
        state: The client's new state.
    """

    update: Update
    state: ClientState


Outcome = Done | Fault


class Backend(ABC):
    """Runs the work of clients.

    The work is a function of task, state and the client's data alone, so all backends give the same answers.

    Args:
        num_workers: How many clients are at work at the same time, where that is a choice; None for what fits.
        timeout: Seconds after which a client that has not answered is left out, where it can be; None for no limit.

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
        """Get ready; once, before the first round. After `close` it may begin again."""

    @abstractmethod
    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        """Do the work of one round, and give the outcomes in any order.

        An error of a client becomes a `Fault` that names it; the others go on.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of everything; also after an error, and as often as one likes."""
