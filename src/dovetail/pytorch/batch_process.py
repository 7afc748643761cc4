"""A dataset gone through batch by batch in any number of processes, without losing the place."""

from __future__ import annotations

import logging
import signal
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from dovetail import checkpoint, core
from dovetail.core.distributed import local_device
from dovetail.data import DataLoader, Share
from dovetail.errors import ConfigError, DataError, misspelled_methods
from dovetail.pytorch.data import to_device
from dovetail.pytorch.reducer import MetricReducer, Reducers
from dovetail.runtime.signals import Interrupted

_logger = logging.getLogger("dovetail.pytorch")

_OURS = ("sampler", "batch_sampler", "num_replicas", "rank")
_REDUCERS = "reducers"
_GROUP = "inference"


class TorchBatchProcessorContext:
    """What a processor is given.

    Attributes:
        device: Where this process computes.
        distributed: The processes that share the dataset.
        max_batches: How many batches each process goes through at most; None for all.
        output_path: Where the files of `upload_path` go. A run that goes on has the same folder.
    """

    def __init__(self, core_context: core.Context, output_path: Path, max_batches: int | None = None) -> None:
        self._core = core_context
        self.distributed = core_context.distributed
        self.device = local_device(self.distributed.local_rank)
        self.max_batches = max_batches
        self.output_path = output_path
        self._reducers = Reducers()
        self._wrapped: list[MetricReducer] = []
        self._warned_types: set[type] = set()

    def get_hparams(self) -> dict[str, Any]:
        """Return the hyperparameters that the launcher or the experiment has given.

        Raises:
            ConfigError: There is neither.
        """
        if self._core.info is None:
            raise ConfigError(
                "get_hparams: there are no hyperparameters, because nothing has launched this script as a trial; use "
                "'python -m dovetail.launch --config FILE' or an experiment"
            )
        return self._core.info.hparams

    def get_distributed_rank(self) -> int:
        """Return the number of this process."""
        return self.distributed.rank

    def get_distributed_size(self) -> int:
        """Return how many processes share the dataset."""
        return self.distributed.size

    def to_device(self, data: Any, warned_types: set[type] | None = None) -> Any:
        """Return data of any structure on the device, as `pytorch.to_device` does."""
        return to_device(data, self.device, self._warned_types if warned_types is None else warned_types)

    def prepare_model_for_inference(self, model: nn.Module) -> nn.Module:
        """Return the model on the device and in evaluation mode."""
        return model.to(self.device).eval()

    @contextmanager
    def upload_path(self) -> Iterator[Path]:
        """Lend an empty folder; its files are in `output_path` when the block ends, in place of any of their names."""
        self.output_path.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=self.output_path) as folder:
            yield Path(folder)
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file():
                    target = self.output_path / file.relative_to(folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(target)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics, as `train.report_metrics` of the Core API does: the first process writes them."""
        self._core.train.report_metrics(group, steps_completed, metrics)

    def wrap_reducer(
        self, reducer: MetricReducer | Callable[[list[Any]], Any], name: str | None = None
    ) -> MetricReducer:
        """Keep a reducer, and return it; its metric over all batches is reported at the end, in the group `inference`.

        What it has gathered is part of the progress that is kept: a run that goes on reports what one without an
        interruption does. Only the order in which a function gets the values is another one then.

        Args:
            reducer: A `MetricReducer`, or a function of the list of all values.
            name: The name of the metric; None when the reducer returns a dict of metrics.
        """
        wrapped = self._reducers.wrap(reducer, name)
        wrapped.reset()
        self._wrapped.append(wrapped)
        return wrapped

    def get_tensorboard_path(self) -> Path:
        """Return the folder for TensorBoard's files."""
        return self._core.train.get_tensorboard_path()

    def _gathered(self) -> list[Any]:
        """Return what each reducer has in each process. All processes call this."""
        own = [reducer.per_slot_reduce() for reducer in self._wrapped]
        return self.distributed.allgather(own) if own else []


class TorchBatchProcessor(ABC):
    """What to do with each batch. Its constructor loads what it needs, such as a model.

    Example:
        >>> class Sum(TorchBatchProcessor):
        ...     def __init__(self, context):
        ...         self.total = context.wrap_reducer(sum, name="total")
        ...     def process_batch(self, batch, batch_idx):
        ...         self.total.update(batch.sum().item())
    """

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context

    @abstractmethod
    def process_batch(self, batch: Any, batch_idx: int) -> None:
        """Process a batch, without gradients.

        Args:
            batch: As the loader made it, on the CPU.
            batch_idx: Its number among the batches of this process.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027  # doing nothing is a good answer
        """Before progress is kept: what was gathered so far has to be safe when this returns."""

    def on_finish(self) -> None:  # noqa: B027  # the same
        """After the last batch, once."""


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: Dataset[Any],
    batch_size: int | None = None,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    distributed_context: core.DistributedContext | None = None,
) -> None:
    """Go through a dataset, in one process or in all that were launched.

    Batches are dealt out in turn: process r of n gets the batches r, r + n, and so on. Progress is kept in the trial's
    folder, or else in `checkpoints`. The same call after a crash goes on from there; batches since the last checkpoint
    are processed again. When all is done, the progress is removed, and the same call begins anew.

    Ctrl-C and SIGTERM are heeded at the next checkpoint.

    Args:
        batch_processor_cls: What to do with each batch.
        dataset: A dataset with indices and a length.
        batch_size: Samples in a batch; None takes that of `dataloader_kwargs`, else 1.
        max_batches: How many batches each process goes through at most; None for all.
        checkpoint_interval: After how many batches of each process progress is kept.
        dataloader_kwargs: Further arguments of the `DataLoader`.
        distributed_context: The processes; None finds out whether this one was launched with others.

    Raises:
        Interrupted: A signal has ended it.

    Example:
        >>> import os, tempfile
        >>> from dovetail.info import VARIABLE, TrialInfo, write_info
        >>> folder = tempfile.mkdtemp()
        >>> write_info(f"{folder}/trial.json", TrialInfo(trial_id=1, directory=folder))
        >>> os.environ[VARIABLE] = f"{folder}/trial.json"  # as a launcher does
        >>> class Show(TorchBatchProcessor):
        ...     def process_batch(self, batch, batch_idx):
        ...         print(batch_idx, batch.tolist())
        >>> torch_batch_process(Show, torch.arange(5), batch_size=2)
        0 [0, 1]
        1 [2, 3]
        2 [4]
        >>> del os.environ[VARIABLE]
    """
    settings = dict(dataloader_kwargs or {})
    batch_size = _batch_size(batch_size, settings)
    # A class with the same methods works without the base.
    if issubclass(batch_processor_cls, TorchBatchProcessor):
        for name, nearest in misspelled_methods(batch_processor_cls, TorchBatchProcessor):
            sentence = f"{batch_processor_cls.__name__}.{name} is never called: did you mean {nearest}?"
            warnings.warn(sentence, UserWarning, stacklevel=2)
    if not _is_count(checkpoint_interval):
        raise ConfigError(f"checkpoint_interval: expected a number of batches from 1 on, got {checkpoint_interval}")
    if max_batches is not None and not _is_count(max_batches):
        raise ConfigError(f"max_batches: expected a number of batches from 1 on, or None, got {max_batches}")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise DataError(f"expected a dataset with indices and a length, got {type(dataset).__name__}")
    with core.init(distributed=distributed_context) as context:
        peers = context.distributed
        work = {"processor": batch_processor_cls.__qualname__, "samples": len(dataset), "batch_size": batch_size}
        progress = _Progress(context, work)
        output = context.checkpoint.directory / progress.output / f"rank_{peers.rank}"
        given = TorchBatchProcessorContext(context, output, max_batches)
        processor = batch_processor_cls(given)
        share = Share(peers.size, peers.rank, begun=progress.steps, used=progress.batches)
        turn, skipped = share.turn(share.begun)
        loader = DataLoader(
            dataset, batch_size=batch_size, shuffle=False, num_replicas=peers.size, rank=turn, **settings
        )
        loader.skip(skipped)
        total = len(dataset) // batch_size if loader.drop_last else -(-len(dataset) // batch_size)
        # As many for everyone, also where batches do not divide: processes that talk must do so equally often.
        num_steps = share.num_steps(total) if max_batches is None else min(share.num_steps(total), max_batches)
        batches = iter(loader)
        for step in range(share.begun, num_steps):
            for batch in islice(batches, 1):
                with torch.no_grad():
                    processor.process_batch(batch, step)
            done = step + 1
            if done % checkpoint_interval == 0 or done == num_steps:
                processor.on_checkpoint_start()
                # Nothing counts as done before what everyone has gathered of it is safe.
                peers.allgather(None)
                progress.keep(done, share.position(done), given._gathered())
                context.train.report_progress(done / num_steps)
                if done < num_steps and context.preempt.should_preempt():
                    raise Interrupted(peers.broadcast(context.preempt.signal or signal.SIGTERM))
        metrics = given._reducers.reduce("predict", lambda own: [*progress.earlier, *peers.allgather(own)])
        if metrics:
            context.train.report_metrics(_GROUP, num_steps, metrics)
        processor.on_finish()
        peers.allgather(None)
        progress.remove()
        if peers.is_chief and output.parent.exists():
            _logger.info("the files of upload_path are in %s", output.parent)


class _Progress:
    """How far the work has come, kept in the folder of the run.

    Attributes:
        steps: How many batches each process has done, in this run and in those that it goes on from.
        batches: How many batches of the dataset are done, from its beginning on.
        output: The name of the folder for the files of the processor.
        earlier: What reducers had gathered in processes that are gone.
    """

    def __init__(self, context: core.Context, work: Mapping[str, Any]) -> None:
        self._store, self._peers, self._work = context.checkpoint, context.distributed, dict(work)
        self._latest = self._peers.broadcast(self._found() if self._peers.is_chief else None)
        self.steps, self.batches, self.output, self.earlier = 0, 0, f"output-{uuid.uuid4()}", []
        if self._latest is not None:
            metadata = self._store.get_metadata(self._latest)
            if (begun := metadata["batch_process"]) != self._work:
                raise ConfigError(
                    f"{self._store.directory} has the progress of {_described(begun)}, not of {_described(work)}: "
                    f"go on with that, or remove {self._store.directory / self._latest}"
                )
            self.steps, self.batches = metadata["steps_completed"], metadata["batches"]
            self.output = metadata["output"]
            with self._store.restore_path(self._latest) as path:
                self.earlier = checkpoint.load(path / _REDUCERS)["slots"]
            _logger.info("going on after %d batches", self.batches)
        self.output = self._peers.broadcast(self.output)

    def keep(self, steps: int, batches: int, gathered: list[Any]) -> None:
        """Keep that every process has done so many steps, and all of them so many batches of the dataset."""
        if not self._peers.is_chief:
            return
        metadata = {"steps_completed": steps, "batches": batches, "output": self.output, "batch_process": self._work}
        with self._store.store_path(metadata) as (path, storage_id):
            checkpoint.save(path / _REDUCERS, {"slots": [*self.earlier, *gathered]})
        if self._latest is not None:
            self._store.delete(self._latest)
        self._latest = storage_id

    def remove(self) -> None:
        """Forget it: the work is done."""
        # Whoever was killed while it kept its progress has left two.
        while self._peers.is_chief and (found := self._found()) is not None:
            self._store.delete(found)

    def _found(self) -> str | None:
        """Return the newest progress of this processor in the folder."""
        name = self._work["processor"]
        return self._store.latest(lambda metadata: metadata.get("batch_process", {}).get("processor") == name)


def _described(work: Mapping[str, Any]) -> str:
    return f"{work['processor']} with {work['samples']} samples in batches of {work['batch_size']}"


def _batch_size(given: int | None, settings: dict[str, Any]) -> int:
    """Return the batch size, and check what else the loader is given."""
    for name in _OURS:
        if name in settings:
            raise ConfigError(
                f"dataloader_kwargs: {name!r} is not accepted: batches are dealt out in the dataset's order"
            )
    if settings.pop("shuffle", False):
        raise ConfigError("dataloader_kwargs: shuffle=True is not accepted: the place would be lost with the order")
    if given is not None and "batch_size" in settings:
        raise ConfigError("batch_size: expected as an argument or in dataloader_kwargs, got both")
    batch_size = settings.pop("batch_size", 1) if given is None else given
    if not _is_count(batch_size):
        raise ConfigError(f"batch_size: expected a number of samples from 1 on, got {batch_size!r}")
    return int(batch_size)


def _is_count(value: Any) -> bool:
    """Whether a value is a whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
