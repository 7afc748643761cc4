"""Data of a trainer: the loaders of its stages, this process's share of them, and the position in the epoch."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch.utils.data as torch_data

from dovetail.data import DataLoader, Share, StreamLoader, is_shared_already, num_batches, shared
from dovetail.data.sharing import is_torchdata_loader
from dovetail.data.streams.recognition import divides_itself
from dovetail.data.streams.stateful import StatefulLoaderStream
from dovetail.errors import DataError
from dovetail.trainers.context import Stage, TrainingContext
from dovetail.trainers.device_copies import DeviceCopier
from dovetail.trainers.fitting import restore, restoring
from dovetail.trainers.reading import Reader, keeps_place


class TrainerData:
    """Reads the loaders of a trainer, and stores the position to resume in the middle of a pass.

    Args:
        context: The context of the trainer.
        limits: The limits of the passes.

    Attributes:
        limits: By stage, the batches of a pass: a whole number of steps, or a part of them.
        loaders: By stage, the data that was given and the loader that was built from it.
        features: The columns of the training data frame that are inputs, in the order of the model; None without one.
    """

    def __init__(self, context: TrainingContext, limits: Mapping[str, float]) -> None:
        self._context = context
        self.limits = limits
        self.loaders: dict[str, tuple[Any, Any]] = {}
        self.features: list[Any] | None = None
        # By rank, a loader, the part of it that the process reads, and the division that the part belongs to.
        self._parts: dict[int, tuple[Any, Any, Any]] = {}
        # Whether the running epoch has the order of this library's seed, also if its loader draws another one. Another
        # number of processes continues with the same order.
        self._is_seeded = False
        # The batch size of a checkpoint that was restored within an epoch; None after its position was converted.
        self._restored_size: int | None = None
        # Checkpoints contain the states of training and validation.
        self._readers = _Readers()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process builds its own loaders.
        return {**vars(self), "loaders": {}, "_parts": {}}

    def key(self, stage: Stage) -> str:
        """Return the key of the loader of a stage, which differs for each of several data sets."""
        name = self._context.run.data_set
        return f"{stage} {name}" if name and stage != "train" else stage

    def forget_loaders(self) -> None:
        """Drop all loaders, so that they are built again when they are needed."""
        self.loaders.clear()
        self._parts.clear()

    def num_batches(self, stage: Stage, loader: Any) -> int | None:
        """Return the steps of all processes in a pass over a loader, up to its limit; None if they are unknown."""
        total = self._num_steps(stage, loader)
        # Data without a length may end before the limit.
        if total is None or stage not in self.limits or (limit := self._limit(stage, loader)) is None:
            return total
        return min(total, limit)

    def _num_steps(self, stage: Stage, loader: Any) -> int | None:
        """Return the steps of a whole pass over a loader; None if the data has no length."""
        if stage == "train" and self._restored_size is not None:
            self._convert_position(loader)
        share = self._context.process.share
        total = num_batches(loader)
        if total is None or is_shared_already(loader):
            return total
        # Only a training pass is resumed in its middle; others are divided from their start.
        return share.num_steps(total) if stage == "train" else Share(share.num_replicas).num_steps(total)

    def _limit(self, stage: Stage, loader: Any) -> int | None:
        """Return the largest number of steps of a pass over a loader; None if it is not limited."""
        limit = self.limits.get(stage)
        if limit is None or isinstance(limit, int):
            return limit
        num_steps = self._num_steps(stage, loader)
        if num_steps is None:
            raise DataError(
                f"a limit of {limit} of the {stage} batches needs data with a length; give a whole number of batches"
            )
        return max(1, int(limit * num_steps))

    def batches(
        self, stage: Stage, loader: Any, *, reads_ahead: bool, copier: DeviceCopier | None = None
    ) -> Iterable[Any]:
        """Return this process's batches of a loader, up to the limit; in training, the rest of the running epoch.

        Args:
            stage: The stage.
            loader: Its loader.
            reads_ahead: True if the loop reads one batch ahead, to detect the last one.
            copier: Starts the copy of each batch to the device one batch ahead; None means no copy.
        """
        batches = self._batches(stage, loader, reads_ahead=reads_ahead)
        if copier is None or reads_ahead:
            return batches
        return self._readers[self.key(stage)].copied_ahead(batches, copier)

    def _batches(self, stage: Stage, loader: Any, *, reads_ahead: bool) -> Iterable[Any]:
        context, progress = self._context, self._context.progress
        reader = self._readers[self.key(stage) if context.run.data_set else stage]
        share = context.process.share
        if stage != "train":
            limit = self._limit(stage, loader)
            if isinstance(loader, StreamLoader) or self._divides(loader, reader):
                loader = self._streamed(loader)
                return _first(limit, loader, reader.batches(loader, epoch=0, start=0, is_running=False))
            loader = reader.own(self._shared(loader, share.rank, is_seeded=share.num_replicas > 1))
            return _first(limit, loader, reader.batches(loader, epoch=progress.epoch, start=0, is_running=False))
        if self._restored_size is not None:
            self._convert_position(loader)
            share = context.process.share
        # A new epoch is shared from its first batch; only a resumed one has a position from which it was divided.
        if progress.batch == 0:
            share = context.process.share = replace(share, start_step=0, used=0)
            self._is_seeded = share.num_replicas > 1
        limit = self._limit(stage, loader) if self.limits else None
        rank, start = share.turn(progress.batch)
        if isinstance(loader, StreamLoader) or self._divides(loader, reader):
            loader, start = self._streamed(loader), share.position(progress.batch)
        else:
            loader = reader.own(self._shared(loader, rank, self._is_seeded))
        # Without checkpoints the run cannot be resumed.
        reason = None if context.run.saver is None else reader.inexact(loader)
        if reason is not None:
            # The note of a stream is about the work of resuming.
            differs = "if this run is resumed, it may differ from an uninterrupted one: "
            warnings.warn(reason if isinstance(loader, StreamLoader) else differs + reason, stacklevel=3)
        batches = reader.batches(
            loader, epoch=progress.epoch, start=start, is_running=progress.batch > 0, reads_ahead=reads_ahead
        )
        return batches if limit is None else _first(limit - progress.batch, loader, batches)

    def _convert_position(self, loader: Any) -> None:
        """Count the used batches of a resumed epoch in batches of this loader, if the checkpoint has another size."""
        before, share, size = self._restored_size, self._context.process.share, _batch_size(loader)
        if before is None or size is None or size == before or self._context.progress.batch == 0:
            self._restored_size = None
            return
        num_samples = share.used * before
        # Torch's sampler selects samples for each process, so each counts its own batches.
        unit = size * share.num_replicas if is_shared_already(loader) else size
        if num_samples % unit or self._readers["train"].has_drawn_ahead:
            raise DataError(
                f"the checkpoint was written within an epoch, after {num_samples} samples in batches of {before}, and "
                f"batches of {size} do not continue there; resume with batch_size={before}, or from a checkpoint at "
                "the end of an epoch"
            )
        self._restored_size, self._context.process.share = None, replace(share, used=num_samples // size)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the order, and the position in the data of training and validation."""
        context = self._context
        train = self._readers["train"]
        train_loader = self.loaders.get("train", (None, None))[1]
        # By the name of the data set, which is empty if there is only one.
        valid = {key.removeprefix("valid").lstrip(): self._valid_state(key) for key in {"valid", *self._valid_keys()}}
        return {
            "order_seed": context.state["order_seed"],
            "is_seeded": self._is_seeded,
            "epoch_start": train.state_dict(train.own(train_loader), is_running=context.progress.batch > 0),
            # None if the seed of the order determines the next validation.
            "valid_data": valid.pop(""),
            **({"valid_sets": valid} if valid else {}),
            # Batches of the running epoch that are used: with several processes, more than one per step.
            "used": context.process.share.position(context.progress.batch),
            # None if the data decides the sizes. A restored position that was not read yet has the earlier size.
            "batch_size": self._restored_size or _batch_size(train_loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; progress must be restored before."""
        context = self._context
        context.state["order_seed"] = restore(state, "order_seed", int, 0)
        restore(state, "epoch_start", self._readers["train"].load_state_dict, {})
        # Checkpoints of earlier versions lack this key; their groups of processes used the seed.
        num_processes = (state["epoch_start"].get("share") or [1])[0]
        self._is_seeded = restore({"is_seeded": num_processes > 1, **state}, "is_seeded", bool, False)
        if state.get("valid_data") is not None:
            restore(state, "valid_data", self._readers["valid"].load_state_dict, {})
        for name, saved in restore({"valid_sets": {}, **state}, "valid_sets", dict, {}).items():
            if saved is not None:
                with restoring(f"valid_sets.{name}"):
                    self._readers[f"valid {name}"].load_state_dict(saved)
        start_step = context.progress.batch
        used = restore({"used": start_step, **state}, "used", operator.index, 0)
        context.process.share = replace(context.process.share, start_step=start_step, used=used)
        # Checkpoints of earlier versions lack this key.
        self._restored_size = restore({"batch_size": None, **state}, "batch_size", _optional_index, None)

    def reset(self) -> None:
        """Forget the running passes, because a new run starts."""
        self._restored_size = None
        for reader in self._readers.values():
            reader.reset()

    def _valid_keys(self) -> list[str]:
        """Return the keys of the validation sets that have a name."""
        return [key for key in self._readers if key.startswith("valid ")]

    def _valid_state(self, key: str) -> dict[str, Any] | None:
        """Return the state of a validation loader; None if the seed of the order determines the next pass."""
        reader = self._readers[key]
        loader = reader.own(self.loaders.get(key, (None, None))[1])
        return reader.state_dict(loader, is_running=False) if reader.has_state(loader) else None

    def _divides(self, loader: Any, reader: Reader) -> bool:
        """Return whether a loader with its own position is read as a stream: if several processes divide the epoch."""
        if self._context.process.share.num_replicas == 1 and not reader.reads_stream:
            return False
        return keeps_place(loader) and not is_shared_already(loader) and not is_torchdata_loader(loader)

    def _streamed(self, loader: Any) -> StreamLoader:
        """Return the part of a stream that this process reads."""
        share, seed = self._context.process.share, self._context.state["order_seed"]
        known, part, of = self._parts.get(_STREAM, (None, None, None))
        if known is not loader or of != (share.num_replicas, share.rank, seed):
            whole = loader
            if not isinstance(loader, StreamLoader):
                whole = StreamLoader(StatefulLoaderStream(loader), None, collate_fn=_unchanged)
                if share.num_replicas > 1 and share.rank == 0:
                    warnings.warn(StatefulLoaderStream.note, stacklevel=5)
            part = whole.share(share.rank, share.num_replicas, seed)
            self._parts[_STREAM] = (loader, part, (share.num_replicas, share.rank, seed))
        return cast(StreamLoader, part)

    def _shared(self, loader: Any, rank: int, is_seeded: bool) -> Any:
        """Return the part of a loader that the process with a given rank reads."""
        share = self._context.process.share
        if (share.num_replicas == 1 and not is_seeded) or is_shared_already(loader):
            return loader
        if share.num_replicas > 1 and divides_itself(loader):
            raise DataError(
                f"{type(getattr(loader, 'dataset', loader)).__name__} divides its samples among processes, and the "
                "trainer would divide each part again: give a dataset that docs/streams.md lists, or train in one "
                "process"
            )
        known, part, of = self._parts.get(rank, (None, None, None))
        if known is not loader or of != (share.num_replicas, is_seeded):
            seed = self._context.state["order_seed"] if is_seeded else None
            part = shared(loader, share.num_replicas, rank, seed)
            self._parts[rank] = (loader, part, (share.num_replicas, is_seeded))
        return part


class _Readers(dict[str, Reader]):
    """Readers by key, created when they are first needed."""

    def __missing__(self, key: str) -> Reader:
        reader = self[key] = Reader(resumable=key == "train")
        return reader


def _batch_size(loader: Any) -> int | None:
    """Return the batch size of a loader that forms batches from samples by index; None for any other data."""
    if not isinstance(loader, torch_data.DataLoader) or isinstance(loader.dataset, torch_data.IterableDataset):
        return None
    return loader.batch_size


def _optional_index(value: Any) -> int | None:
    return None if value is None else operator.index(value)


# The key of a part of a stream, among parts by rank.
_STREAM = -1


def _unchanged(batch: Any) -> Any:
    return batch


def _first(number: int | None, loader: Any, batches: Iterable[Any]) -> Iterable[Any]:
    """Return the first batches of a pass over a loader; None means all of them.

    Raises:
        DataError: The loader stores its own position, which would be in the middle of its data after the pass.
    """
    if number is None:
        return batches
    if keeps_place(loader):
        raise DataError(
            "a loader with its own position (state_dict) cannot be limited to some of its batches: give the dataset, "
            "or a torch DataLoader"
        )
    return _take(number, loader, batches)


def _take(number: int, loader: Any, batches: Iterable[Any]) -> Iterator[Any]:
    yield from islice(batches, max(number, 0))
    if isinstance(loader, DataLoader):
        # The pass ends here. Otherwise a checkpoint would hold its position, and workers would have read ahead.
        loader._restart_workers()
        loader.set_epoch(loader.epoch + 1)
