"""Gradient exchanges of a run: one for each optimizer, with the state of their compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from dovetail.distributed import Group
from dovetail.errors import ConfigError
from dovetail.trainers.capabilities.compression import Compression, mean_state, unit_of
from dovetail.trainers.capabilities.exchange import GradientExchange
from dovetail.trainers.context import TrainingContext


class Exchanges:
    """Builds the exchange of each optimizer when it is needed, and stores the state of the compression.

    Args:
        context: The context of the trainer.
        bucket_size: The largest number of bytes of gradients in a message.
        compression: The form in which gradients are sent; None means in full.

    Attributes:
        by_optimizer: The exchanges by the id of their optimizer.
        overlapping: The exchanges that can send gradients while the backward pass runs.
    """

    def __init__(self, context: TrainingContext, bucket_size: int, compression: Compression | None) -> None:
        self._context = context
        self._bucket_size = bucket_size
        self._compression = compression
        # The compression's state of a checkpoint, by the number of the optimizer, until its gradients are averaged.
        self._saved: dict[str, Any] = {}
        self.by_optimizer: dict[int, GradientExchange] = {}
        self.overlapping: list[GradientExchange] = []

    def start_run(self, *, is_fresh: bool) -> None:
        """Drop the exchanges of a run that an error interrupted; a new run also starts without errors of compression.

        Raises:
            ConfigError: The errors of the compression cannot be added to later gradients.
        """
        self.by_optimizer, self.overlapping = {}, []
        precision, compression = self._context.precision, self._compression
        if compression is None:
            return
        if compression.has_feedback and precision is not None and precision.scaler is not None:
            raise ConfigError(
                f"compression: {compression!r} adds the errors of one update to the next one, whose loss fp16 may "
                "scale by another factor; use precision='bf16', or compression='fp16'"
            )
        if is_fresh:
            self._saved = {}

    def prepare(self, group: Group, can_overlap: Callable[[], bool]) -> None:
        """Divide the gradients before the first batch, so that its gradients already travel in its backward pass."""
        # A compression may need the weights of an update, which are known when it is averaged.
        for optimizer in self._context.optimizers if self._compression is None else ():
            if id(optimizer) not in self.by_optimizer:
                self._build(group, optimizer, 0, can_overlap)

    def open(self, weight: Any, factor: Any) -> None:
        """Send the buckets that the next backward pass completes; see `GradientExchange.open`."""
        for exchange in self.overlapping:
            if self._compression is not None:
                exchange.is_compressed = self._compression.applies(self._context.progress.updates)
            exchange.open(weight, factor)

    def close(self) -> None:
        """Send nothing more before the average."""
        for exchange in self.overlapping:
            exchange.close()

    def average(
        self, group: Group, optimizer: Optimizer, weight: Any, counts: list[float], can_overlap: Callable[[], bool]
    ) -> tuple[list[float], float]:
        """Average an optimizer's gradients over all processes, and return the sums of `counts` and the whole weight."""
        exchange, sums = self.by_optimizer.get(id(optimizer)), None
        if self._compression is not None and exchange is not None:
            exchange.is_compressed = self._compression.applies(self._context.progress.updates)
        if exchange is not None and exchange.optimizer is optimizer:
            sums = exchange.average(group, weight, counts)
        if exchange is None or sums is None:
            exchange = self._build(group, optimizer, weight, can_overlap)
            sums = exchange.average(group, weight, counts)
            assert sums is not None
        return sums, exchange.weight

    def leave(self) -> None:
        """Remove the hooks, and store the state of the compression for another run."""
        if self._compression is not None:
            self._saved = self.compression_state()
        for exchange in self.by_optimizer.values():
            exchange.leave()
        self.by_optimizer, self.overlapping = {}, []

    def compression_state(self) -> dict[str, Any]:
        """Return the state of the compression in this process, by the number of the optimizer."""
        running = {self._position(it.optimizer): it.state_dict() for it in self.by_optimizer.values()}
        return {**self._saved, **running}

    def load_compression_state(self, saved: Sequence[Any], rank: int, size: int) -> None:
        """Restore this process's state from those of all; another number of processes continues with their mean."""
        self._saved = saved[rank] if len(saved) == size else mean_state(saved)

    def _build(
        self, group: Group, optimizer: Optimizer, weight: Any, can_overlap: Callable[[], bool]
    ) -> GradientExchange:
        """Divide the gradients of an optimizer into buckets. A collective call."""
        compression, position = self._compression, self._position(optimizer)
        old = self.by_optimizer.get(id(optimizer))
        if old is not None:
            old.leave()
        model = self._context.model
        order = () if model is None else model.parameters()
        saved, unit = self._saved.pop(position, None), 1.0
        if saved is not None:
            unit = saved["unit"]
        elif compression is not None and compression.needs_unit:
            total = torch.tensor([0.0 if weight is None else float(weight)], dtype=torch.float64)
            group.sum(total)
            unit = unit_of(total.item())
        exchange = GradientExchange(optimizer, order, self._bucket_size, compression, unit)
        self.by_optimizer[id(optimizer)] = exchange
        if saved is not None:
            exchange.load_state_dict(saved)
        elif old is not None:
            exchange.continue_from(old)
        exchange.is_compressed = compression is not None and compression.applies(self._context.progress.updates)
        if group.size > 1:
            exchange.prepare_overlap(group)
        if not can_overlap():
            exchange.stop_overlap()
        self.overlapping = [it for it in self.by_optimizer.values() if it.overlaps]
        return exchange

    def _position(self, optimizer: Optimizer) -> str:
        """Return the name of an optimizer in a checkpoint: its number among those of the trainer."""
        optimizers = self._context.optimizers
        return str(optimizers.index(optimizer) if optimizer in optimizers else len(optimizers))
