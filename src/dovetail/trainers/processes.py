"""Training in a process of its own, all of whose results come back.

The trainer and its data go to a spawned child through a pipe, pickled: code and objects of our own, never a file that
somebody wrote. What comes back is data only, a checkpoint in a temporary folder.
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
    circumstances,
    load_error,
    rebuilt,
    saved_error,
    set_circumstances,
)
from dovetail.runtime.signals import ignore_interrupts
from dovetail.trainers.reuse import configure, reset
from dovetail.trainers.transfer import initial_state, set_initial_state, take_trained_state, trained_state

if TYPE_CHECKING:
    from dovetail.trainers.trainer import Trainer


_RESULT, _FAILURE = "result", "failure.json"

# Seconds that a child has, after Ctrl-C, to finish its update and to save.
_GRACE = 30.0


class Seats:
    """Lets in so many at once, and no more.

    Example:
        >>> seats = Seats()
        >>> with seats.taken(limit=2), seats.taken(limit=2):
        ...     seats.num_taken
        2
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, limit: int) -> Iterator[None]:
        """Wait until fewer than `limit` seats are taken, and take one."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_taken < limit)
            self.num_taken += 1
        try:
            yield
        finally:
            with self._changed:
                self.num_taken -= 1
                self._changed.notify_all()


# Children belong to the process, whichever trainer or thread started them, and so does their number.
_CHILDREN = Seats()


@dataclass
class Errand:
    """One training to be done elsewhere.

    Attributes:
        trainer: Who trains.
        trainset: The data of a new run; None goes on with the trainer's own, where `config` is None.
        sampler: Which of them.
        config: What `train_model` is given; None for `train`.
    """

    trainer: Trainer
    trainset: Any
    sampler: Any
    config: Mapping[str, Any] | None = None

    @property
    def begins_anew(self) -> bool:
        """Whether progress, history and optimizers start from nothing."""
        return self.trainset is not None or self.config is not None

    def pack(self) -> bytes:
        """Return this errand, with the state that training starts from, for `unpack`.

        Raises:
            ConfigError: A piece cannot be pickled; the message names it.
        """
        initial = initial_state(self.trainer, continues=not self.begins_anew)
        try:
            # Not multiprocessing's pickler: torch has taught that one to move tensors to memory shared with the child,
            # one open file each, so that the child would train the caller's own weights.
            return pickle.dumps((self, initial))
        except Exception as error:
            what, cause = next(self._culprits(), ("the trainer", error))
            raise ConfigError(
                f"max_concurrency: {what} cannot be sent to a training process: {cause}; use functions and classes "
                "from the top level of a module, or train without max_concurrency"
            ) from error

    @classmethod
    def unpack(cls, cargo: bytes) -> Errand:
        """Return the errand, ready to run in this process, quietly."""
        errand: Errand
        errand, initial = pickle.loads(cargo)  # noqa: S301 - the bytes of our own caller, through a pipe
        trainer = errand.trainer
        trainer.options.max_concurrency = None
        callbacks = trainer.context.callbacks
        callbacks.remove(*[callback for callback in callbacks if isinstance(callback, ProgressDisplay)])
        set_initial_state(trainer, initial)
        return errand

    def run(self) -> dict[str, Any]:
        """Train, and return all that the caller's trainer needs to be in the same state."""
        trainer = self.trainer
        started = time.perf_counter()
        if self.config is None:
            # Not an override in a subclass: it has called the one that sent the trainer here.
            trainer._train_here(self.trainset, self.sampler)
        else:
            # Only a trainer with plato's names is sent with a configuration.
            cast("Any", trainer).train_model(self.config, self.trainset, self.sampler)
        seconds = time.perf_counter() - started
        payload = trainer.strategies.model_update.get_update_payload(trainer.context)
        return {"seconds": seconds, "payload": payload, **trained_state(trainer)}

    def take(self, result: Mapping[str, Any]) -> None:
        """Bring the trainer to where `run` has brought its copy."""
        trainer, context = self.trainer, self.trainer.context
        if self.begins_anew:
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
        take_trained_state(trainer, trainer.plan(), result)

    def _culprits(self) -> Iterator[tuple[str, Exception]]:
        for name, piece in self._pieces():
            try:
                _Alone(self.trainer).dump(piece)
            except Exception as error:
                yield f"{name} ({type(piece).__name__})", error

    def _pieces(self) -> Iterator[tuple[str, Any]]:
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
    """Train in a spawned process, at most `max_concurrency` of which run at once, and bring all of it back.

    The trainer ends in the very state that training here would have left: weights (in the caller's own module),
    optimizers, schedulers, history, progress, randomness, and the states of strategies, callbacks and participants. It
    is the same to the last bit if both compute with the same number of threads. Of objects without a `state_dict`
    nothing comes back, and of `context.state` what a checkpoint can hold. After an error the trainer is as it was.

    The child starts from the generators of this process and leaves them where it ended. Threads that train at the same
    time share them, as always: give each trainer a `seed`.

    The child computes with its share of the cores, shows no progress, and ends when the caller does. Ctrl-C ends
    it after its running update, and a second one at once. `setup` and `teardown` of strategies stay with the caller.

    Args:
        trainer: A trainer with the option `max_concurrency`.
        trainset: Training data, as `train` takes it.
        sampler: Which of them.
        config: What `train_model` is given; None to do what `train` does.

    Returns:
        The seconds that training took, without the start of the process, and the payload of the update strategy.

    Raises:
        ConfigError: A piece cannot be pickled.
        TrainingProcessError: The process was killed, or ended by an error that is neither Python's own nor ours; those
            are raised as what they are. A note has the traceback of the child.
    """
    limit = trainer.options.max_concurrency
    assert limit is not None
    errand = Errand(trainer, trainset, sampler, config)
    with (
        _CHILDREN.taken(limit),
        TemporaryDirectory(prefix="dovetail-training-", ignore_cleanup_errors=True) as folder,
    ):
        exit_code = _spawn(errand.pack(), folder, limit)
        failure = Path(folder, _FAILURE)
        if failure.exists():
            raise rebuilt(load_error(failure))
        if exit_code != 0:
            guard = "; a program must start training below `if __name__ == '__main__':`" if 0 < exit_code < 128 else ""
            raise TrainingProcessError(f"the training process {describe_exit(exit_code)}, and nothing came back{guard}")
        result = store.load(Path(folder, _RESULT))
    errand.take(result)
    return result["seconds"], result["payload"]


def _spawn(cargo: bytes, folder: str, limit: int) -> int:
    """Run a child to its end, and return its exit code."""
    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)
    # Not a daemon: those may have no children, and so no loader with workers.
    given = theirs, folder, circumstances(limit)
    child = spawn.Process(target=_work, args=given, name="dovetail-training", daemon=False)
    with ours:
        with theirs:
            child.start()
        try:
            # A child that is no more says by its exit code what became of it.
            with suppress(BrokenPipeError):
                ours.send_bytes(cargo)
            child.join()
        except BaseException:
            _end(child)
            raise
    assert child.exitcode is not None
    return child.exitcode


def _end(child: SpawnProcess) -> None:
    child.terminate()
    try:
        child.join(_GRACE)
    finally:
        child.kill()
        child.join()


def _work(cargo: Connection, folder: str, found: Mapping[str, Any]) -> None:
    """The whole life of a child."""
    # The caller passes Ctrl-C on as SIGTERM, once.
    ignore_interrupts()
    set_circumstances(found)
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        with saved_error(Path(folder, _FAILURE)):
            store.save(Path(folder, _RESULT), Errand.unpack(cargo.recv_bytes()).run())
    finally:
        caller = multiprocessing.parent_process()
        if caller is not None and not caller.is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def _end_with_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.kill(os.getpid(), signal.SIGTERM)


# ------------------------------------------------------------------ what can be sent, and what comes back


class _Alone(pickle.Pickler):
    """Pickles a piece without the trainer that it may know, whose other pieces are not its fault."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(io.BytesIO())
        self._known = (trainer, trainer.context)

    def persistent_id(self, piece: Any) -> str | None:
        return "trainer" if any(piece is it for it in self._known) else None
