"""Automatic batch size: search for the largest size that fits, and micro-batches after running out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from dovetail.accelerators import free_memory, widest_float
from dovetail.callbacks import Callback, Callbacks
from dovetail.data import concat
from dovetail.data.batches import map_tensors, slice_batch
from dovetail.errors import ConfigError, DataError, add_note
from dovetail.trainers.base import Trainer
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.context import TrainingContext, clear_gradients
from dovetail.trainers.diagnosis import as_output, naming_loss
from dovetail.trainers.fitting import restoring
from dovetail.trainers.preserve_state import layers, own_callbacks, preserve_state
from dovetail.trainers.window import positive
from dovetail.units import Batches, Progress

_T = TypeVar("_T")


class AutoBatch(Capability):
    """Splits a batch that does not fit into memory into micro-batches that make the same update.

    When a step runs out of memory, the batch is computed again in halves, quarters and so on. The gradient equals the
    gradient of the whole batch: the mean over its items, to which each micro-batch adds its share. The size that worked
    is kept for the batches that follow, and in checkpoints. The loss of the batch is the mean over its items, other
    numbers that a step returns are means over samples, and tensors are concatenated. Batches of validation and
    prediction are split in the same way.

    Each micro-batch is a separate forward pass: BatchNorm normalises over it and updates its running statistics, and
    dropout draws for it. A batch cannot be split if `train_step` calls `context.backward`; the error is then raised.

    Attributes:
        micro_batch_size: The most samples that a training step computes at once; None until a batch did not fit.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> class Narrow(torch.nn.Linear):
        ...     def forward(self, inputs):
        ...         if len(inputs) > 20:
        ...             raise torch.OutOfMemoryError("more than 20 rows")
        ...         return super().forward(inputs)
        >>> trainer = Trainer.add_on(AutoBatch)(Narrow(4, 2), "cpu", num_epochs=1, verbose=False)
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> trainer.micro_batch_size, trainer.context.progress.updates
        (16, 1)
    """

    kind = "batch sizing"
    conflicts: ClassVar[Mapping[str, str]] = {
        "sharded data parallel": "a process that cuts its batch would compute more often than the others, and all "
        "would wait for each other"
    }

    # The largest number of samples that fitted, by stage.
    _sizes: dict[str, int]
    _is_active: bool
    _is_inside_part: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sizes = {}
        self._is_active = True
        self._is_inside_part = False
        super().__init__(*args, **kwargs)

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples that a training step computes at once; None until a batch did not fit."""
        return self._sizes.get("train")

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the loss of the whole batch; with micro-batches, backward is done for all but the last one."""
        step = super().train_step
        if self._is_inside_part or not self._is_active:
            return step(batch)
        gradients = _Gradients(self.context)

        def compute(size: int, length: int) -> Mapping[str, Any]:
            if size < length:
                return self._in_parts(step, batch, size, length, gradients)
            output = step(batch)
            return output if self.context.run.batch.optimized else self._release_graph(output, batch, gradients)

        if "train" in self._sizes:
            return self._fitting("train", batch, compute, gradients)
        # While every batch fits, a step has no extra work.
        try:
            output = step(batch)
            return output if self.context.run.batch.optimized else self._release_graph(output, batch, gradients)
        except Exception as error:
            failure = self._check_error(error, batch)
        return self._fitting("train", batch, compute, gradients, failure=failure)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Raise inside a micro-batch: a step that calls backward would make an update from a part of the batch."""
        if self._is_inside_part:
            raise _ManualStepError(_MANUAL)
        super().backward(loss, **kwargs)

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the outputs of `test_step` for the whole batch."""
        return self._evaluate(batch, naming_loss(super().test_step), _join_outputs)

    def predict_step(self, batch: Any) -> Any:
        """Return the predictions for the whole batch."""
        return self._evaluate(batch, super().predict_step, lambda outputs, lengths: concat(outputs))

    def state_dict(self) -> dict[str, Any]:
        """Add the sizes that fitted, so that a resumed run splits the same batches."""
        return {**super().state_dict(), "auto_batch": dict(self._sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sizes."""
        super().load_state_dict(state)
        with restoring("auto_batch"):
            self._sizes = {name: int(size) for name, size in state.get("auto_batch", {}).items()}

    # ------------------------------------------------------------------ private

    def _fitting(
        self,
        what: Literal["train", "evaluation"],
        batch: Any,
        compute: Callable[[int, int], _T],
        gradients: _Gradients | None = None,
        *,
        size: int | None = None,
        failure: Exception | None = None,
    ) -> _T:
        """Return `compute(size, length)` for the largest size that fits; every failure halves the size."""
        length = self.batch_length(batch)
        size = min(size or length, self._sizes.get(what, length), length)
        while True:
            # Not in the handler: its frames still hold the tensors of the failed attempt.
            if failure is not None:
                if gradients is not None:
                    gradients.restore()
                _free(self.context.device)
                size = (size + 1) // 2
            try:
                result = compute(size, length)
                break
            except _ManualStepError as refusal:
                if failure is None:
                    raise ConfigError(str(refusal)) from None
                add_note(failure, str(refusal))
                raise failure from None
            except Exception as error:
                failure = self._check_error(error, batch, size)
        if size < length:
            self._sizes[what] = size
        return result

    def _check_error(self, error: Exception, batch: Any, size: int | None = None) -> Exception:
        """Return an error without its frames, or raise it if a smaller part of the batch would not help."""
        length = self.batch_length(batch)
        if not is_out_of_memory(error):
            raise error
        if self.context.run.batch.optimized and self.context.stage == "train":
            add_note(error, _MANUAL)
            raise error
        if (size or length) == 1:
            add_note(error, "not even a single sample fits into memory")
            raise error
        try:
            slice_batch(batch, 0, 1, length)
        except DataError as reason:
            add_note(error, str(reason))
            raise error from None
        return error.with_traceback(None)

    def _evaluate(self, batch: Any, step: Callable[[Any], _T], join: Callable[..., _T]) -> _T:
        if not self._is_active:
            return step(batch)

        def compute(size: int, length: int) -> _T:
            if size >= length:
                return step(batch)
            bounds = _bounds(length, size)
            return join(
                [step(slice_batch(batch, *bound, length)) for bound in bounds],
                [stop - start for start, stop in bounds],
            )

        return self._fitting("evaluation", batch, compute)

    def _in_parts(
        self, step: Callable[[Any], Mapping[str, Any]], batch: Any, size: int, length: int, gradients: _Gradients
    ) -> Mapping[str, Any]:
        """Call backward for all micro-batches but the last; the graph of the returned loss is the graph of the last."""
        context, window = self.context, self.context.run.window
        bounds = _bounds(length, size)
        outputs: list[Mapping[str, Any]] = []
        expected: Any = None
        for start, stop in bounds:
            output = self._part(step, slice_batch(batch, start, stop, length))
            loss, num_items = output["loss"], _items(output, stop - start)
            if expected is None:
                # `num_items` of the whole batch is known after the last part only: extrapolate from the first one.
                expected = positive(num_items * (length / (stop - start))) if "num_items" in output else length
            if stop < length:
                # The divisor that the loop will use: this batch opens its window, or the window already has one.
                share = (
                    num_items / (expected * window.size)
                    if window.opens
                    else window.weight(num_items, first_of_batch=False)
                )
                assert context.run.trainer is not None
                context.run.trainer.backward(loss * share)
            outputs.append(map_tensors(Tensor.detach, output))
        joined = _join_outputs(outputs, [stop - start for start, stop in bounds])
        total = positive(_items(joined, length))
        if window.opens and (isinstance(total, Tensor) or total != expected):
            gradients.scale(expected / total)
        return self._release_graph(joined, batch, gradients, loss * (num_items / total), size)

    def _part(self, step: Callable[[Any], Mapping[str, Any]], part: Any) -> Mapping[str, Any]:
        """Return the output of a step for one micro-batch; raise if the step optimizes by itself."""
        self._is_inside_part = True
        try:
            output = step(part)
        finally:
            self._is_inside_part = False
        if self.context.run.batch.optimized:
            raise _ManualStepError(_MANUAL)
        return as_output(output)

    def _release_graph(
        self,
        output: Mapping[str, Any] | Tensor,
        batch: Any,
        gradients: _Gradients,
        differentiated: Tensor | None = None,
        size: int | None = None,
    ) -> Mapping[str, Any]:
        """Return the output with a loss that holds no graph: the loop holds the loss while the batch is recomputed."""
        output = {"loss": output} if isinstance(output, Tensor) else output
        loss = output.get("loss") if isinstance(output, Mapping) else None
        source = loss if differentiated is None else differentiated
        if not isinstance(source, Tensor) or not isinstance(loss, Tensor) or not source.requires_grad:
            return output
        graph = [source]
        counted = {"num_items": output["num_items"]} if "num_items" in output else {}

        def differentiate(gradient: Tensor) -> None:
            try:
                # Popped: a reference to the failed graph would keep its memory while the batch is computed again.
                graph.pop().backward(gradient)  # type: ignore[no-untyped-call]  # torch has no types for it
            except Exception as error:
                failure = self._check_error(error, batch, size)
            else:
                gradients.copies = None
                return

            def compute(size: int, length: int) -> None:
                self._all_parts(batch, size, length, positive(_items(counted, length)), gradient)

            self._fitting("train", batch, compute, gradients, size=size, failure=failure)
            gradients.copies = None

        # Autograd calls `_DetachedLoss.backward` only if an input of the function requires a gradient.
        anchor = torch.zeros((), requires_grad=True)
        detached = _DetachedLoss.apply(anchor, loss.detach(), differentiate)  # type: ignore[no-untyped-call]  # torch has no types
        # Detach all other outputs: they would hold the graph, too.
        return {**map_tensors(Tensor.detach, output), "loss": detached} if len(output) > 1 else {"loss": detached}

    def _all_parts(self, batch: Any, size: int, length: int, total: Any, gradient: Tensor) -> None:
        """Recompute a batch inside the backward pass that failed; `gradient` already includes scale and weight."""
        assert self.context.run.trainer is not None
        for start, stop in _bounds(length, size):
            with torch.enable_grad():
                output = self._part(self.context.run.trainer.train_step, slice_batch(batch, start, stop, length))
            output["loss"].backward(gradient * (_items(output, stop - start) / total))


def find_batch_size(trainer: Trainer, data: Any = None, *, start: int = 16, limit: int | None = None) -> int:
    """Return the largest batch size whose training steps fit into memory; the trainer does not change.

    Sizes are doubled from `start` until one does not fit, followed by a binary search. Each size is tried with one real
    update of the trainer, which is restored afterwards. The search holds a copy of the weights and the optimizer state,
    so the result is slightly too small rather than too large.

    Args:
        trainer: The outermost layer, with a model.
        data: Training data that is not yet in batches, so not a loader; None means the data that the trainer has.
        start: The first size to try.
        limit: The largest size to try; None means the number of samples.

    Raises:
        ConfigError: The trainer does not form the batches of this data, or neither a length nor a limit is known.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> x, y = torch.zeros(300, 4), torch.zeros(300, dtype=torch.long)
        >>> trainer = Trainer(torch.nn.Linear(4, 2), "cpu", verbose=False)
        >>> trainer.options.batch_size = find_batch_size(trainer, (x, y), limit=256)
        >>> trainer.options.batch_size
        256
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 1 or (limit is not None and limit < 1):
        raise ConfigError(f"find_batch_size: expected start and limit of at least 1, got {start!r} and {limit!r}")
    if trainer.context.model is None:
        raise ConfigError("find_batch_size: the trainer has no model: give it one, Trainer(model, …)")
    with _trial(trainer, data, 1):
        num_samples = trainer.num_batches("train")
    if num_samples is None and limit is None:
        raise ConfigError("find_batch_size: the data has no length, so give a limit")
    most = min(it for it in (num_samples, limit) if it is not None)
    largest, too_large, size = 0, most + 1, min(start, most)
    while largest + 1 < too_large:
        failure = _failure(trainer, data, size)
        if failure is None:
            largest = size
        elif size == 1:
            add_note(failure, "not even a single sample fits into memory")
            raise failure
        else:
            too_large = size
        del failure
        _free(trainer.context.device)
        # No size has failed yet, so there is no upper bound for a binary search.
        size = min(2 * size, most) if too_large > most else (largest + too_large) // 2
    return largest


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory is exhausted, on any device.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


# Messages of torch's plain RuntimeError on a CPU, on Apple's devices and with older CUDA libraries.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

_MANUAL = (
    "the batch cannot be cut into micro-batches, because train_step optimises by itself: make smaller batches, or "
    "return the loss and leave backward and step to the loop"
)


class _ManualStepError(Exception):
    """A step would make an update from a part of its batch."""


class _DetachedLoss(torch.autograd.Function):
    """A loss whose backward pass calls a function, so that holding the loss does not hold its graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, differentiate: Callable[[Tensor], None]) -> Tensor:
        ctx.differentiate = differentiate
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.differentiate(*gradients)
        return None, None, None


class _Gradients:
    """The gradients before a batch, to restore them when the batch is computed again.

    Before the first batch of a window there are none. A later batch adds to the gradients in place, parameter by
    parameter, so an error in the middle leaves unusable sums. Only then a copy is needed, until the batch is done.

    Attributes:
        copies: Pairs of a parameter and a copy of its gradient, which may be None. The attribute itself is None for a
            first batch, and after the last use.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._optimizers = context.optimizers
        self.copies: list[tuple[Tensor, Tensor | None]] | None = None
        if not context.run.window.opens:
            self.copies = [(it, None if it.grad is None else it.grad.clone()) for it in self._parameters()]

    def restore(self) -> None:
        """Restore the gradients."""
        if self.copies is None:
            for optimizer in self._optimizers:
                clear_gradients(optimizer)
            return
        for parameter, copy in self.copies:
            if copy is None or parameter.grad is None:
                parameter.grad = None if copy is None else copy.clone()
            else:
                parameter.grad.copy_(copy)

    def scale(self, factor: Any) -> None:
        """Multiply the gradients; only for the first batch of a window."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _parameters(self) -> Iterator[Tensor]:
        return (it for optimizer in self._optimizers for group in optimizer.param_groups for it in group["params"])


def _bounds(length: int, size: int) -> list[tuple[int, int]]:
    """Divide `length` into parts of nearly equal size, none larger than `size`."""
    # A rest of one sample would be too small for BatchNorm.
    number = -(-length // size)
    edges = [length * index // number for index in range(number + 1)]
    return list(pairwise(edges))


def _join_outputs(outputs: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the output of a step for all samples, from the outputs for its parts."""
    items = [_items(output, length) for output, length in zip(outputs, lengths, strict=True)]
    joined: dict[str, Any] = {}
    for name, first in outputs[0].items():
        values = [output[name] for output in outputs]
        if name in ("num_items", "num_tokens"):
            joined[name] = sum(values)
        elif _is_number(first, may_have_dimensions=name == "loss"):
            weights = items if name == "loss" else lengths
            total = positive(sum(weights))
            joined[name] = sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))
        else:
            joined[name] = concat(values)
    return joined


def _is_number(value: Any, *, may_have_dimensions: bool) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, (int, float))
    return value.ndim == 0 or (may_have_dimensions and value.numel() == 1)


def _items(output: Mapping[str, Any], length: int) -> Any:
    """Return the number of items that a loss is the mean of, as a divisor."""
    items = output.get("num_items", length)
    # A count of integers would be divided in float32, which is too coarse for a float64 loss.
    return items.to(widest_float(items.device.type)) if isinstance(items, Tensor) else items


def _free(device: torch.device) -> None:
    """Release cached memory of the device."""
    gc.collect()
    free_memory(device)


@contextmanager
def _trial(trainer: Trainer, data: Any, size: int) -> Iterator[None]:
    """Prepare the trainer for batches of a size from the start of an epoch, and restore it afterwards."""
    context, core = trainer.context, trainer.core
    with preserve_state(trainer, train=data):
        for layer in layers(trainer):
            if isinstance(layer, AutoBatch):
                layer._is_active = False
        context.progress = Progress()
        core.options.batch_size = size  # type: ignore[attr-defined]  # every trainer of the library has it
        context.callbacks = Callbacks([_BatchesOf(size), *own_callbacks(context)])
        yield


def _failure(trainer: Trainer, data: Any, size: int) -> BaseException | None:
    """Return the error if a step with this batch size runs out of memory, else None."""
    never = Batches(0)
    try:
        with _trial(trainer, data, size):
            trainer.fit(
                max_length=Batches(trainer.context.run.window.size), validation_period=never, checkpoint_period=never
            )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)
    return None


class _BatchesOf(Callback):
    """Raises if the batches do not have the size that is tried."""

    def __init__(self, size: int) -> None:
        self._size = size

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        assert context.run.trainer is not None
        length = context.run.trainer.batch_length(batch)
        if length != self._size and context.progress.batch == 0:
            raise ConfigError(
                f"find_batch_size: the batches have {length} samples, independent of batch_size; give the dataset "
                "instead of a loader, and leave out strategies that choose the size"
            )
