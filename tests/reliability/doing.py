"""Clients with scripted actions, for backends whose workers are other processes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import torch

from dovetail.federated.backends import Backend, Done, Outcome, Work, Worker
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.states import ClientState

# Workers cannot import what pytest has found by its own path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Doing:
    """A client that performs the action for its id, and answers with its process id."""

    def __init__(self, deeds: dict[int, Callable[[], Any]] | None = None) -> None:
        self.deeds = deeds or {}

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        told = self.deeds.get(task.client_id, lambda: None)()
        return Update(task.client_id, task.round, 1, payload={"pid": os.getpid(), "told": told}), state


class Fragile(Doing):
    """A client that cannot be received."""

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no such disk here")


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def hang() -> None:
    while True:
        signal.pause()


def tasks(count: int, number: int = 1) -> list[Work]:
    """One task of a round for each of so many clients."""
    weights = {"w": torch.zeros(1000)}
    return [(Task(number, client, weights), {}) for client in range(1, count + 1)]


@contextmanager
def started(backend: Backend, worker: Worker) -> Iterator[Backend]:
    backend.start(worker)
    try:
        yield backend
    finally:
        backend.close()


def done(outcomes: list[Outcome]) -> dict[int, Any]:
    """What clients have answered, by their ids."""
    return {it.update.client_id: it.update.payload for it in outcomes if isinstance(it, Done)}


def faults(outcomes: list[Outcome]) -> list[Fault]:
    return [it for it in outcomes if isinstance(it, Fault)]
