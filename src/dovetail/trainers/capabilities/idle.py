"""State that a batch with weight zero must not change: random numbers, buffers, gradients of the window."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.distributed import Group, own_part
from dovetail.errors import CheckpointError, DataError
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.randomness import rng_state, set_rng_state
from dovetail.trainers.schedules.whole_run import RunScheduleLR
from dovetail.trainers.window import Window


class IdleBatch:
    """Random numbers and buffers before a batch with weight zero, which must not change them.

    Args:
        modules: The modules whose buffers depend on the batches of this process alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._randomness = rng_state()
        self._buffers = [
            (module._buffers, name, buffer, own_part(buffer).clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Restore the random number generators and the buffers, such as running statistics."""
        set_rng_state(self._randomness)
        with torch.no_grad():
            for owner, name, buffer, values in self._buffers:
                own_part(buffer).copy_(values)
                # A module may have replaced the tensor.
                owner[name] = buffer


class IdleWindow:
    """Gradients and items of an accumulation window whose last batches have weight zero.

    Args:
        window: The window, after the last batch of this process that counts.
        optimizers: The optimizers of the run.
    """

    def __init__(self, window: Window, optimizers: Iterable[Optimizer]) -> None:
        self.items: Any = window.items
        self._window = window
        self._parameters = [it for each in optimizers for group in each.param_groups for it in group["params"]]
        # The same division as at the end of the window, by the items that count.
        factor = window.correction
        self._gradients = {it: None if it.grad is None else it.grad.detach() * factor for it in self._parameters}
        # Parameters whose zeros stand for no gradient.
        self._unused: set[Tensor] = set()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the gradients of a backward pass, and the items of its batch.

        Otherwise they would be part of a second update of the batch, of which `restore` knows nothing.
        """
        parameters = self._parameters
        own, self._window.items = [it.grad for it in parameters], self.items
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, gradient in zip(parameters, own, strict=True):
            if gradient is None and parameter.grad is not None:
                # Not None: code of the user may change it in place.
                gradient = torch.zeros_like(parameter.grad)
                self._unused.add(parameter)
            parameter.grad = gradient

    def restore(self, optimizer: Optimizer) -> None:
        """Restore the gradients of an optimizer, for its first update only; later only remove those of no real batch.

        A compiled step, or a layer that computes gradients itself, adds to them without `dropping`.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._gradients:
                    parameter.grad = self._gradients.pop(parameter)
                elif parameter in self._unused:
                    # Otherwise momentum and weight decay would move a parameter that no real batch used.
                    parameter.grad = None
                self._unused.discard(parameter)


def is_set_anywhere(group: Group, flag: bool) -> bool:
    """Return whether a flag is set in any process. A collective call."""
    count = torch.tensor([flag], dtype=torch.float32)
    group.sum(count)
    return bool(count.item())


def lent_batch(group: Group, batch: Any, have: Sequence[bool]) -> Any:
    """Return the batch of the first process that has one. A collective call.

    A message turns a named tuple into a tuple, so the names are sent, too.

    Args:
        group: The group.
        batch: The batch of this process, if it has one.
        have: The processes that have a batch.
    """
    lender = have.index(True)
    is_own = group.rank == lender
    names = list(getattr(batch, "_fields", ())) if is_own else []
    try:
        received = group.exchange({"batch": batch if is_own else None, "names": names})[lender]
    except CheckpointError as error:
        raise DataError(
            f"there are fewer batches than processes, and a {type(batch).__name__} cannot be sent to a process without "
            f"a batch, which computes along with the others; give at least {group.size} batches, or batches that are "
            "tensors, arrays, numbers, strings, or containers of them"
        ) from error
    lent, names = received["batch"], received["names"]
    return namedtuple("Batch", names, rename=True)(*lent) if names else lent


def different_lengths(context: TrainingContext, lengths: Sequence[int | None]) -> Sequence[int | None]:
    """Return the lengths of the training data of all processes if they differ; raise if the run depends on the length.

    Windows, periods and schedules would end at other batches in each process: the processes would wait for each other
    forever, or train with different rates.
    """
    if len(set(lengths)) == 1:
        return ()
    plan = context.run.plan
    causes = {
        "gradient accumulation": context.run.window.size > 1,
        "a length or a period that is not in epochs": plan is not None and plan.acts_inside,
        "a schedule over the run": any(isinstance(it.scheduler, RunScheduleLR) for it in context.schedulers),
    }
    for cause in (cause for cause, is_there in causes.items() if is_there):
        found = " and ".join(
            f"{'an unknown number' if length is None else length} in rank {rank}" for rank, length in enumerate(lengths)
        )
        raise DataError(
            f"{cause} needs training data with as many batches in every process, got {found}; give every process the "
            "same data, which the trainer divides, or a loader without a length"
        )
    return lengths
