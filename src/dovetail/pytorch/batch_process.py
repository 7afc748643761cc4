"""Batch inference over a dataset in any number of processes, resumable after an interruption."""

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
    """The context that a batch processor is built with.

    Attributes:
        device: The device of this process.
        distributed: The processes that share the dataset.
        max_batches: The largest number of batches per process; None means all.
        output_path: The folder for the files of `upload_path`. A resumed run uses the same folder.
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
        """Return the hyperparameters from the launcher or the experiment.

        Raises:
            ConfigError: The script was started without a launcher or an experiment.
        """
        if self._core.info is None:
            raise ConfigError(
                "get_hparams: there are no hyperparameters, because this script was not launched as a trial; use "
                "'python -m dovetail.launch --config FILE' or an experiment"
            )
        return self._core.info.hparams

    def get_distributed_rank(self) -> int:
        """Return the rank of this process."""
        return self.distributed.rank

    def get_distributed_size(self) -> int:
        """Return the number of processes that share the dataset."""
        return self.distributed.size

    def to_device(self, data: Any, warned_types: set[type] | None = None) -> Any:
        """Return data of any structure on the device, like `pytorch.to_device`."""
        return to_device(data, self.device, self._warned_types if warned_types is None else warned_types)

    def prepare_model_for_inference(self, model: nn.Module) -> nn.Module:
        """Return the model on the device and in evaluation mode."""
        return model.to(self.device).eval()

    @contextmanager
    def upload_path(self) -> Iterator[Path]:
        """Yield an empty folder. When the block ends, its files move to `output_path` and replace files there."""
        self.output_path.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unfinished-", dir=self.output_path) as folder:
            yield Path(folder)
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file():
                    # The temporary folder is inside of `output_path`, so that this is a rename on one file system.
                    target = self.output_path / file.relative_to(folder)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(target)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics like `train.report_metrics` of the Core API: the first process writes them."""
        self._core.train.report_metrics(group, steps_completed, metrics)

    def wrap_reducer(
        self, reducer: MetricReducer | Callable[[list[Any]], Any], name: str | None = None
    ) -> MetricReducer:
        """Register a reducer and return it. Its metric over all batches is reported at the end, in group `inference`.

        The values of reducers are stored with the progress, so a resumed run reports the same metrics as an
        uninterrupted one. Only the order of the values that a function gets may differ.

        Args:
            reducer: A `MetricReducer`, or a function of the list of all values.
            name: The name of the metric; None when the reducer returns a dict of metrics.
        """
        wrapped = self._reducers.wrap(reducer, name)
        wrapped.reset()
        self._wrapped.append(wrapped)
        return wrapped

    def get_tensorboard_path(self) -> Path:
        """Return the folder for TensorBoard files."""
        return self._core.train.get_tensorboard_path()

    def _gather_values(self) -> list[Any]:
        """Return the value of each reducer in each process. A collective call: every process must make it."""
        own = [reducer.per_slot_reduce() for reducer in self._wrapped]
        return self.distributed.allgather(own) if own else []


class TorchBatchProcessor(ABC):
    """Base class of batch processors. The constructor loads what the processor needs, such as a model.

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
            batch: The batch as the loader returned it, on the CPU.
            batch_idx: Its index among the batches of this process.
        """

    def on_checkpoint_start(self) -> None:  # noqa: B027  # an optional hook
        """Called before progress is stored: results so far must be saved when this returns."""

    def on_finish(self) -> None:  # noqa: B027  # an optional hook
        """Called once, after the last batch."""


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: Dataset[Any],
    batch_size: int | None = None,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    distributed_context: core.DistributedContext | None = None,
) -> None:
    """Process a dataset in batches, in this process or in all launched processes.

    Process r of n gets the batches r, r + n, and so on. Progress is stored in the trial's folder, or else in
    `checkpoints`. After a crash the same call resumes from the last checkpoint and repeats only the batches since
    then. When all batches are done, the progress is removed, and the same call starts from the first batch.

    Ctrl-C and SIGTERM stop the run at the next checkpoint.

    Args:
        batch_processor_cls: The class that processes each batch.
        dataset: A dataset with indices and a length.
        batch_size: Samples in a batch; None means the one of `dataloader_kwargs`, or else 1.
        max_batches: The largest number of batches per process; None means all.
        checkpoint_interval: Batches per process between two stores of the progress.
        dataloader_kwargs: Further arguments of the `DataLoader`.
        distributed_context: The processes; None means those that a launcher started, or only this process.

    Raises:
        Interrupted: The run was stopped by a signal.

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
    # A class with the same methods is accepted without the base class.
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
        # Identifies the work: with another dataset or batch size, the stored number of batches means other samples.
        work = {"processor": batch_processor_cls.__qualname__, "samples": len(dataset), "batch_size": batch_size}
        progress = _Progress(context, work)
        output = context.checkpoint.directory / progress.output / f"rank_{peers.rank}"
        given = TorchBatchProcessorContext(context, output, max_batches)
        processor = batch_processor_cls(given)
        # A resumed run may have another number of processes: batches that are done are left out, the rest is dealt
        # again.
        share = Share(peers.size, peers.rank, start_step=progress.steps, used=progress.batches)
        turn, skipped = share.turn(share.start_step)
        loader = DataLoader(
            dataset, batch_size=batch_size, shuffle=False, num_replicas=peers.size, rank=turn, **settings
        )
        loader.skip(skipped)
        # The batches of the whole dataset; the loader has only the batches of this process.
        total = len(dataset) // batch_size if loader.drop_last else -(-len(dataset) // batch_size)
        # The same number in every process, also if batches do not divide: otherwise the collective calls below hang.
        num_steps = share.num_steps(total) if max_batches is None else min(share.num_steps(total), max_batches)
        batches = iter(loader)
        for step in range(share.start_step, num_steps):
            # At most one batch: in the last step, some processes have none left but must still make the calls below.
            for batch in islice(batches, 1):
                with torch.no_grad():
                    processor.process_batch(batch, step)
            done = step + 1
            if done % checkpoint_interval == 0 or done == num_steps:
                processor.on_checkpoint_start()
                # A batch counts as done only after every process has saved its results.
                peers.allgather(None)
                progress.keep(done, share.position(done), given._gather_values())
                context.train.report_progress(done / num_steps)
                if done < num_steps and context.preempt.should_preempt():
                    # The chief's signal, so that all processes exit with the same code.
                    raise Interrupted(peers.broadcast(context.preempt.signal or signal.SIGTERM))
        # The values of interrupted runs count as further processes.
        metrics = given._reducers.reduce("predict", lambda own: [*progress.earlier, *peers.allgather(own)])
        if metrics:
            context.train.report_metrics(_GROUP, num_steps, metrics)
        processor.on_finish()
        # The progress is removed only after every process has finished its results.
        peers.allgather(None)
        progress.remove()
        if peers.is_chief and output.parent.exists():
            _logger.info("the files of upload_path are in %s", output.parent)


class _Progress:
    """The progress of a batch process, stored as a checkpoint in the folder of the run.

    Attributes:
        steps: Batches that each process has done, including earlier runs that this one resumes.
        batches: Batches of the dataset that are done, counted from its start.
        output: The name of the folder for the files of the processor.
        earlier: Values of the reducers from the processes of earlier runs.
    """

    def __init__(self, context: core.Context, work: Mapping[str, Any]) -> None:
        self._store, self._peers, self._work = context.checkpoint, context.distributed, dict(work)
        # Only the chief searches, so that all processes resume from the same checkpoint.
        self._latest = self._peers.broadcast(self._found() if self._peers.is_chief else None)
        self.steps, self.batches, self.output, self.earlier = 0, 0, f"output-{uuid.uuid4()}", []
        if self._latest is not None:
            metadata = self._store.get_metadata(self._latest)
            if (begun := metadata["batch_process"]) != self._work:
                raise ConfigError(
                    f"{self._store.directory} has the progress of {_described(begun)}, not of {_described(work)}: "
                    f"resume that work, or remove {self._store.directory / self._latest}"
                )
            self.steps, self.batches = metadata["steps_completed"], metadata["batches"]
            self.output = metadata["output"]
            with self._store.restore_path(self._latest) as path:
                self.earlier = checkpoint.load(path / _REDUCERS)["slots"]
            _logger.info("resuming after %d batches", self.batches)
        # Each process has drawn another random name; all use the chief's.
        self.output = self._peers.broadcast(self.output)

    def keep(self, steps: int, batches: int, gathered: list[Any]) -> None:
        """Store that every process has done `steps` batches, and all of them together `batches` of the dataset."""
        if not self._peers.is_chief:
            return
        metadata = {"steps_completed": steps, "batches": batches, "output": self.output, "batch_process": self._work}
        with self._store.store_path(metadata) as (path, storage_id):
            checkpoint.save(path / _REDUCERS, {"slots": [*self.earlier, *gathered]})
        # After the new checkpoint is complete: a kill in between leaves two, and the newest one is used.
        if self._latest is not None:
            self._store.delete(self._latest)
        self._latest = storage_id

    def remove(self) -> None:
        """Remove the stored progress when the work is done."""
        # A run that was killed while it stored its progress has left two checkpoints.
        while self._peers.is_chief and (found := self._found()) is not None:
            self._store.delete(found)

    def _found(self) -> str | None:
        """Return the name of the newest progress of this processor in the folder."""
        name = self._work["processor"]
        return self._store.latest(lambda metadata: metadata.get("batch_process", {}).get("processor") == name)


def _described(work: Mapping[str, Any]) -> str:
    return f"{work['processor']} with {work['samples']} samples in batches of {work['batch_size']}"


def _batch_size(given: int | None, settings: dict[str, Any]) -> int:
    """Return the batch size and check the other arguments of the loader."""
    for name in _OURS:
        if name in settings:
            raise ConfigError(
                f"dataloader_kwargs: {name!r} is not accepted: batches are processed in the dataset's order"
            )
    if settings.pop("shuffle", False):
        raise ConfigError("dataloader_kwargs: shuffle=True is not accepted: a shuffled order cannot be resumed")
    if given is not None and "batch_size" in settings:
        raise ConfigError("batch_size: expected as an argument or in dataloader_kwargs, got both")
    batch_size = settings.pop("batch_size", 1) if given is None else given
    if not _is_count(batch_size):
        raise ConfigError(f"batch_size: expected a number of samples from 1 on, got {batch_size!r}")
    return int(batch_size)


def _is_count(value: Any) -> bool:
    """Return whether a value is a whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
