"""Launcher of training in several processes on this machine.

Every entry point has new processes, so nothing of a run is left in the next one. On Linux they are forked from a
process that has imported torch and that stays until the program ends; elsewhere they are new interpreters.

The trainer and its data are pickled and sent to the workers through a socket that only this user can open. The workers
never unpickle a file. They return only data: a checkpoint in a temporary folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle

from dovetail import checkpoint as store
from dovetail.data.batches import class_name, in_class
from dovetail.distributed import PeerError
from dovetail.errors import ConfigError
from dovetail.runtime.elastic import run_workers
from dovetail.runtime.forked_group import become_worker, run_group
from dovetail.runtime.relay import (
    TrainingProcessError,
    apply_worker_settings,
    load_error,
    rebuild_error,
    saved_error,
    worker_settings,
)
from dovetail.runtime.signals import Interrupted
from dovetail.trainers import loop, run_scope
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import Plan
from dovetail.trainers.transfer import apply_trained_state, initial_state, set_initial_state, trained_state

_RESULT, _INTERRUPTED = "result", "interrupted"
# Forks of a process that has imported libraries of Apple are not safe, and Windows has none.
_FORKS = sys.platform == "linux"


@dataclass(frozen=True)
class ProcessLauncher:
    """Starts the processes of a run on this machine.

    Attributes:
        num_processes: The number of processes.
        max_restarts: How often a group that lost a process is restarted.
    """

    num_processes: int
    max_restarts: int = 0

    def __call__(self, trainer: Trainer, entry: str, arguments: Mapping[str, Any]) -> Any:
        """Run an entry point of a trainer in the processes, and copy the results into the caller's objects.

        Raises:
            ConfigError: An object cannot be sent to the processes.
            TrainingProcessError: A process was killed, or raised an error class that is neither Python's nor ours;
                other errors are raised with their own class. A note has the traceback of the worker.
            Interrupted: A signal ended the run, here or in a worker.
        """
        message = _pack(trainer, entry, arguments)
        with TemporaryDirectory(prefix="dovetail-run-", ignore_cleanup_errors=True) as folder:
            found = json.dumps(worker_settings(self.num_processes)).encode()
            with _serve_messages((found, message), Path(folder, "socket")):
                # The socket stays open as long as workers run, because restarted ones connect again.
                outcome = self._run(folder)
            if isinstance(outcome, dict) and outcome:
                raise _failure(Path(folder), outcome)
            result = Path(folder, _RESULT)
            if result.exists():
                returned = _apply_result(trainer, entry, arguments, store.load(result))
            # After the state was copied: an interrupted run keeps its progress, as it does in one process.
            number = _signal_in(Path(folder)) or (outcome if isinstance(outcome, int) else None)
            if number is not None:
                raise Interrupted(number)
            return returned

    def _run(self, folder: str) -> dict[int, int] | int:
        """Run the processes, and return the exit codes of failed ones by rank, or the signal that ended them."""
        if _FORKS:
            return run_group(f"{__name__}:work_forked", [folder], self.num_processes, self.max_restarts)
        command = ("-m", "dovetail.trainers.worker", folder)
        outcome = run_workers(command, self.num_processes, folder, self.max_restarts)
        if isinstance(outcome, int):
            return outcome
        return {rank: end.exitcode for rank, end in outcome.failures.items()}


def work_forked(descriptors: Sequence[int], details: Mapping[str, Any]) -> None:
    """Run a forked worker process."""
    become_worker(descriptors, details)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    work(Path(*details["arguments"]))


def work(folder: Path) -> None:
    """Run a worker process: receive the trainer, run the entry point, and write the result."""
    rank = int(os.environ["RANK"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # Torch marks an optimizer when a scheduler is built for it, to check their order; pickling loses the mark.
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden", UserWarning)
    with saved_error(folder / f"failure-{attempt}-{rank}.json", rank=rank):
        with Client(str(folder / "socket"), "AF_UNIX") as caller:
            # Before unpickling: classes of the user are importable only with the module path of the caller.
            apply_worker_settings(json.loads(caller.recv_bytes()))
            trainer, entry, arguments, initial = cloudpickle.loads(caller.recv_bytes())
        set_initial_state(trainer, initial)
        # The agent has restarted the group after a failure. Without checkpoints, training starts again from the
        # initial state.
        if attempt and entry == "fit" and _keeps_checkpoints(trainer, arguments):
            arguments = {**arguments, "resume": "auto"}
        returned, number = None, None
        try:
            returned = getattr(loop, entry)(trainer, **arguments)
        except Interrupted as interruption:
            # After a second signal nothing is saved, so there is no state to return.
            if interruption.at_once:
                raise
            number = interruption.number
        # In every process: if each holds a part of the model, the state is gathered by a collective call.
        result = trained_state(trainer) if entry == "fit" else {"returned": returned, "class": class_name(returned)}
        if rank == 0:
            store.save(folder / _RESULT, result)
            if number is not None:
                (folder / _INTERRUPTED).write_text(str(number), encoding="ascii")


# ------------------------------------------------------------------ sending the trainer, receiving the result


def _pack(trainer: Trainer, entry: str, arguments: Mapping[str, Any]) -> bytes:
    initial = initial_state(trainer, continues=True)
    try:
        # Unlike pickle, it also sends classes and functions of a script or a notebook, which workers do not import.
        return bytes(cloudpickle.dumps((trainer, entry, dict(arguments), initial)))
    except Exception as error:
        raise ConfigError(f"the trainer or its data cannot be sent to other processes: {error}") from error


def _apply_result(trainer: Trainer, entry: str, arguments: Mapping[str, Any], result: Mapping[str, Any]) -> Any:
    """Set the trainer to the state of its copies in the workers, and return the result of the entry point."""
    if entry != "fit":
        return in_class(result["class"], result["returned"])
    run_scope.set_data(trainer.context, train=arguments["train_data"], valid=arguments["val_data"])
    apply_trained_state(trainer, _planned(trainer, arguments), result)
    return trainer.context.history


def _keeps_checkpoints(trainer: Trainer, arguments: Mapping[str, Any]) -> bool:
    return _planned(trainer, arguments).save is not None


def _planned(trainer: Trainer, arguments: Mapping[str, Any]) -> Plan:
    return trainer.plan(**{name: arguments[name] for name in ("max_length", "validation_period", "checkpoint_period")})


def _failure(folder: Path, exit_codes: Mapping[int, int]) -> Exception:
    """Return the error of a worker: its own if there is one, else the signal that killed it, else a report about it."""
    errors = [load_error(path) for path in sorted(folder.glob("failure-*.json"))]
    # A PeerError only reports that another process is gone; the error of that process is the cause.
    own = [each for each in errors if each["name"] != PeerError.__name__]
    killed = {rank: signal.Signals(-code).name for rank, code in exit_codes.items() if code < 0}
    if not own and killed:
        ends = " and ".join(f"rank {rank} was ended by {name}" for rank, name in sorted(killed.items()))
        return TrainingProcessError(f"{ends}, which ended the run")
    if own or errors:
        # File names are ordered by attempt, so the last one is from the last attempt.
        return rebuild_error((own or errors)[-1])
    codes = " and ".join(f"rank {rank} ended with exit code {code}" for rank, code in exit_codes.items())
    return TrainingProcessError(f"{codes}, without a result")


def _signal_in(folder: Path) -> int | None:
    path = folder / _INTERRUPTED
    return int(path.read_text(encoding="ascii")) if path.exists() else None


# ------------------------------------------------------------------ socket of the launcher


@contextmanager
def _serve_messages(messages: Sequence[bytes], address: Path) -> Iterator[None]:
    """Send the messages to every worker that connects to a socket, in a folder that only this user can read."""
    listener = Listener(str(address), "AF_UNIX")

    def serve() -> None:
        # The listener is closed when the run is over.
        with suppress(OSError):
            while True:
                with listener.accept() as worker, suppress(OSError):
                    for message in messages:
                        worker.send_bytes(message)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield
    finally:
        # A blocked accept returns on shutdown, but not when the listener is closed.
        listener._listener._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]  # there is no public way
        listener.close()
