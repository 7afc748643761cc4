"""Training in a separate process, with all results copied back.

The trainer and its data are pickled and sent to a spawned process through a pipe. The process never unpickles a file.
It returns only data: a checkpoint in a temporary folder.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from dovetail import checkpoint as store
from dovetail.callbacks import ProgressDisplay
from dovetail.errors import ConfigError
from dovetail.runtime.processes import describe_exit
from dovetail.runtime.relay import (
    TrainingProcessError,
    apply_worker_settings,
    load_error,
    rebuild_error,
    saved_error,
    worker_settings,
)
from dovetail.runtime.signals import ignore_interrupts
from dovetail.trainers.reuse import configure, reset
from dovetail.trainers.transfer import apply_trained_state, initial_state, set_initial_state, trained_state

if TYPE_CHECKING:
    from dovetail.trainers.trainer import Trainer


_RESULT, _FAILURE = "result", "failure.json"

# Seconds that a child process has, after Ctrl-C, to finish its update and to save.
_GRACE = 30.0


class ConcurrencyLimit:
    """Limits the number of threads inside a block.

    Example:
        >>> limiter = ConcurrencyLimit()
        >>> with limiter.enter(limit=2), limiter.enter(limit=2):
        ...     limiter.num_active
        2
    """

    def __init__(self) -> None:
        self.num_active = 0
        self._changed = threading.Condition()

    @contextmanager
    def enter(self, limit: int) -> Iterator[None]:
        """Wait until fewer than `limit` blocks are active, then enter."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_active < limit)
            self.num_active += 1
        try:
            yield
        finally:
            with self._changed:
                self.num_active -= 1
                self._changed.notify_all()


# One limit per process: it counts the children of all trainers and threads.
_CHILDREN = ConcurrencyLimit()


@dataclass
class RemoteJob:
    """One training run for another process.

    Attributes:
        trainer: The trainer.
        trainset: The data of a new run; if this and `config` are None, the trainer continues with its own data.
        sampler: The samples to use.
        config: The configuration for `train_model`; None means to call `train`.
    """

    trainer: Trainer
    trainset: Any
    sampler: Any
    config: Mapping[str, Any] | None = None

    @property
    def is_new_run(self) -> bool:
        """True if progress, history and optimizers are reset first."""
        return self.trainset is not None or self.config is not None

    def pack(self) -> bytes:
        """Return this object and the initial state of training as bytes, for `unpack`.

        Raises:
            ConfigError: An object cannot be pickled; the message names it.
        """
        initial = initial_state(self.trainer, continues=not self.is_new_run)
        try:
            # Not multiprocessing's pickler: torch makes it move tensors to shared memory, with one open file each, and
            # the child would then train the caller's own weights.
            return pickle.dumps((self, initial))
        except Exception as error:
            what, cause = next(self._culprits(), ("the trainer", error))
            raise ConfigError(
                f"max_concurrency: {what} cannot be sent to a training process: {cause}; use functions and classes "
                "from the top level of a module, or train without max_concurrency"
            ) from error

    @classmethod
    def unpack(cls, message: bytes) -> RemoteJob:
        """Return the job, ready to run in this process, without progress display."""
        job: RemoteJob
        job, initial = pickle.loads(message)  # noqa: S301 - the caller sent these bytes through a pipe
        trainer = job.trainer
        # Otherwise this process would start another one.
        trainer.options.max_concurrency = None
        callbacks = trainer.context.callbacks
        callbacks.remove(*[callback for callback in callbacks if isinstance(callback, ProgressDisplay)])
        set_initial_state(trainer, initial)
        return job

    def run(self) -> dict[str, Any]:
        """Train, and return the state that the caller's trainer needs."""
        trainer = self.trainer
        started = time.perf_counter()
        if self.config is None:
            # Not `train`: a subclass may override it, and its override has already called this code.
            trainer._train_here(self.trainset, self.sampler)
        else:
            # Only a trainer with plato's names receives a configuration.
            cast("Any", trainer).train_model(self.config, self.trainset, self.sampler)
        seconds = time.perf_counter() - started
        payload = trainer.strategies.model_update.get_update_payload(trainer.context)
        return {"seconds": seconds, "payload": payload, **trained_state(trainer)}

    def take(self, result: Mapping[str, Any]) -> None:
        """Set the trainer to the state of the copy that ran."""
        trainer, context = self.trainer, self.trainer.context
        # The same preparation as the copy had in its process, so that the loaded state fits.
        if self.is_new_run:
            reset(trainer)
            trainer._sampler = self.sampler
            if self.config is not None:
                configure(trainer, self.config)
            if self.trainset is not None:
                context.run.data["train"] = self.trainset
        else:
            trainer._saves_by_default = True
        trainer._data.forget_loaders()
        context.state.pop("train_loader", None)
        apply_trained_state(trainer, trainer.plan(), result)

    def _culprits(self) -> Iterator[tuple[str, Exception]]:
        for name, piece in self._pieces():
            try:
                _Alone(self.trainer).dump(piece)
            except Exception as error:
                yield f"{name} ({type(piece).__name__})", error

    def _pieces(self) -> Iterator[tuple[str, Any]]:
        """Yield the parts of a job by the names that a user knows, to find the part that cannot be pickled."""
        trainer = self.trainer
        yield "trainset", self.trainset
        yield "sampler", self.sampler
        yield "model", trainer.model
        for strategy in trainer.strategies:
            yield f"{strategy.role}_strategy", strategy
        for callback in trainer.context.callbacks:
            yield "the callback", callback
        for name, metric in trainer.context.run.metrics.items():
            yield f"the metric {name!r}", metric
        for stage, data in trainer.context.run.data.items():
            yield f"the {stage} data", data
        yield from ((f"the trainer's {name}", value) for name, value in vars(trainer).items() if name != "_closing")


def train_in_process(
    trainer: Trainer, trainset: Any, sampler: Any, config: Mapping[str, Any] | None = None
) -> tuple[float, dict[str, Any]]:
    """Train in a spawned process, at most `max_concurrency` of which run at once, and copy all results back.

    The trainer ends in the same state as after training in this process: weights (in the caller's own module),
    optimizers, schedulers, history, progress, RNG, and the states of strategies, callbacks and participants. The state
    is the same to the last bit if both use the same number of threads. Objects without a `state_dict` are not copied
    back, and of `context.state` only the values that a checkpoint can hold. After an error the trainer is unchanged.

    The child starts with the RNG state of this process, and its final RNG state is copied back. Threads that train at
    the same time share the generators: give each trainer a `seed`.

    The child uses its share of the cores, shows no progress, and ends when the caller does. Ctrl-C stops it after its
    running update, and a second one immediately. `setup` and `teardown` of strategies run in the caller.

    Args:
        trainer: A trainer with the option `max_concurrency`.
        trainset: Training data, as for `train`.
        sampler: The samples to use.
        config: The configuration for `train_model`; None means to call `train`.

    Returns:
        The seconds of training, without the start of the process, and the payload of the update strategy.

    Raises:
        ConfigError: An object cannot be pickled.
        TrainingProcessError: The process was killed, or raised an error class that is neither Python's nor ours; other
            errors are raised with their own class. A note has the traceback of the child.
    """
    limit = trainer.options.max_concurrency
    assert limit is not None
    job = RemoteJob(trainer, trainset, sampler, config)
    with (
        _CHILDREN.enter(limit),
        TemporaryDirectory(prefix="dovetail-training-", ignore_cleanup_errors=True) as folder,
    ):
        exit_code = _spawn(job.pack(), folder, limit)
        failure = Path(folder, _FAILURE)
        if failure.exists():
            raise rebuild_error(load_error(failure))
        if exit_code != 0:
            guard = "; a program must start training below `if __name__ == '__main__':`" if 0 < exit_code < 128 else ""
            raise TrainingProcessError(f"the training process {describe_exit(exit_code)} without a result{guard}")
        result = store.load(Path(folder, _RESULT))
    job.take(result)
    return result["seconds"], result["payload"]


def _spawn(message: bytes, folder: str, limit: int) -> int:
    """Run a child process until it ends, and return its exit code."""
    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)
    # Not a daemon: a daemon may not have children, and so no data workers.
    given = theirs, folder, worker_settings(limit)
    child = spawn.Process(target=_work, args=given, name="dovetail-training", daemon=False)
    with ours:
        with theirs:
            child.start()
        try:
            # If the child has already ended, its exit code reports the reason.
            with suppress(BrokenPipeError):
                ours.send_bytes(message)
            child.join()
        except BaseException:
            _end(child)
            raise
    assert child.exitcode is not None
    return child.exitcode


def _end(child: SpawnProcess) -> None:
    """End a child process: by SIGTERM, and after a grace period by SIGKILL."""
    # SIGTERM ends training after the running update, with a checkpoint. SIGKILL follows if this takes too long.
    child.terminate()
    try:
        child.join(_GRACE)
    finally:
        child.kill()
        child.join()


def _work(connection: Connection, folder: str, found: Mapping[str, Any]) -> None:
    """Run a child process: receive the job, train, and write the result or the error."""
    # The caller forwards Ctrl-C as one SIGTERM.
    ignore_interrupts()
    apply_worker_settings(found)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        with saved_error(Path(folder, _FAILURE)):
            store.save(Path(folder, _RESULT), RemoteJob.unpack(connection.recv_bytes()).run())
    finally:
        # The caller removes the folder, unless it was killed.
        caller = multiprocessing.parent_process()
        if caller is not None and not caller.is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.kill(os.getpid(), signal.SIGTERM)


# ------------------------------------------------------------------ finding the object that cannot be pickled


class _Alone(pickle.Pickler):
    """Pickles an object without the trainer that it may refer to, so that only its own errors are reported."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(io.BytesIO())
        self._known = (trainer, trainer.context)

    def persistent_id(self, piece: Any) -> str | None:
        return "trainer" if any(piece is it for it in self._known) else None
