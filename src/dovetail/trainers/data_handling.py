"""Data of a trainer: the loaders of its stages, this process's share of them, and the position in the epoch."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dovetail.data import Share, is_shared_already, num_batches, shared
from dovetail.errors import DataError
from dovetail.trainers.context import Stage, TrainingContext
from dovetail.trainers.fitting import restore
from dovetail.trainers.reading import Reader, keeps_place


class TrainerData:
    """Reads the loaders of a trainer, and stores the position to resume in the middle of a pass.

    Args:
        context: The context of the trainer.

    Attributes:
        loaders: By stage, the data that was given and the loader that was built from it.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self.loaders: dict[str, tuple[Any, Any]] = {}
        # By rank, a loader, the part of it that the process reads, and the number of processes.
        self._parts: dict[int, tuple[Any, Any, int]] = {}
        # Checkpoints contain the states of the first two.
        self._readers = {stage: Reader(resumable=stage == "train") for stage in ("train", "valid", "test", "predict")}

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process builds its own loaders.
        return {**vars(self), "loaders": {}, "_parts": {}}

    def forget_loaders(self) -> None:
        """Drop all loaders, so that they are built again when they are needed."""
        self.loaders.clear()
        self._parts.clear()

    def num_batches(self, stage: Stage, loader: Any) -> int | None:
        """Return the steps of all processes in a pass over a loader; None if the data has no length."""
        share = self._context.process.share
        total = num_batches(loader)
        if total is None or is_shared_already(loader):
            return total
        return share.num_steps(total) if stage == "train" else Share(share.num_replicas).num_steps(total)

    def batches(self, stage: Stage, loader: Any, *, reads_ahead: bool) -> Iterable[Any]:
        """Return this process's batches of a loader; in training, the rest of the running epoch.

        Args:
            stage: The stage.
            loader: Its loader.
            reads_ahead: True if the loop reads one batch ahead, to detect the last one.
        """
        context, progress, reader = self._context, self._context.progress, self._readers[stage]
        if stage != "train":
            loader = reader.own(self._shared(loader, context.process.share.rank))
            return reader.batches(loader, epoch=progress.epoch, start=0, is_running=False)
        if progress.batch == 0:
            context.process.share = replace(context.process.share, begun=0, used=0)
        rank, start = context.process.share.turn(progress.batch)
        loader = reader.own(self._shared(loader, rank))
        reason = None if context.run.saver is None else reader.inexact(loader)
        if reason is not None:
            warnings.warn(f"if this run is resumed, it may differ from an uninterrupted one: {reason}", stacklevel=3)
        return reader.batches(
            loader, epoch=progress.epoch, start=start, is_running=progress.batch > 0, reads_ahead=reads_ahead
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the order, and the position in the data of training and validation."""
        context = self._context
        train, valid = self._readers["train"], self._readers["valid"]
        train_loader, valid_loader = (self.loaders.get(stage, (None, None))[1] for stage in ("train", "valid"))
        valid_loader = valid.own(valid_loader)
        return {
            "order_seed": context.state["order_seed"],
            "epoch_start": train.state_dict(train.own(train_loader), is_running=context.progress.batch > 0),
            # None if the next validation is determined by the seed of the order.
            "valid_data": valid.state_dict(valid_loader, is_running=False) if valid.has_state(valid_loader) else None,
            # Batches of the running epoch that are used: with several processes, more than one per step.
            "used": context.process.share.position(context.progress.batch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; progress must be restored before."""
        context = self._context
        context.state["order_seed"] = restore(state, "order_seed", int, 0)
        restore(state, "epoch_start", self._readers["train"].load_state_dict, {})
        if state.get("valid_data") is not None:
            restore(state, "valid_data", self._readers["valid"].load_state_dict, {})
        begun = context.progress.batch
        used = restore({"used": begun, **state}, "used", operator.index, 0)
        context.process.share = replace(context.process.share, begun=begun, used=used)

    def reset(self) -> None:
        """Forget the running pass, because a new run starts. Only these two stages can be continued."""
        self._readers["train"].reset()
        self._readers["valid"].reset()

    def _shared(self, loader: Any, rank: int) -> Any:
        """Return the part of a loader that the process with a given rank reads."""
        share = self._context.process.share
        if share.num_replicas == 1 or is_shared_already(loader):
            return loader
        if keeps_place(loader):
            raise DataError(
                "a loader with its own position (state_dict) cannot be shared by several processes: give the dataset, "
                "or a loader whose sampler is a DistributedSampler"
            )
        known, part, of = self._parts.get(rank, (None, None, 0))
        if known is not loader or of != share.num_replicas:
            part = shared(loader, share.num_replicas, rank, self._context.state["order_seed"])
            self._parts[rank] = (loader, part, share.num_replicas)
        return part
