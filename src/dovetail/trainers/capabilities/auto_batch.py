"""Batches as large as memory allows: found before training, and cut where they turn out too large."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from dovetail.callbacks import Callback, Callbacks
from dovetail.data import concat
from dovetail.data.batches import map_tensors, slice_batch
from dovetail.errors import ConfigError, DataError, add_note
from dovetail.trainers.base import Trainer
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.context import TrainingContext, clear_gradients
from dovetail.trainers.fitting import restoring
from dovetail.trainers.preserve_state import layers, own_callbacks, preserve_state
from dovetail.units import Batches, Progress

_T = TypeVar("_T")


class AutoBatch(Capability):
    """Cuts a batch that does not fit into memory into micro-batches, and makes the same update of them.

    When a step runs out of memory, the batch is computed again in halves, quarters and so on. The gradient is that of
    the whole batch: the mean over its items, to which each micro-batch adds its share. The size that worked is kept for
    the batches that follow, and in checkpoints. The loss of the batch is the mean over its items, other numbers that
    a step returns are means over samples, and tensors are joined. Validation and prediction are cut in the same way.

    Each micro-batch is a forward pass of its own: BatchNorm normalises by it and counts it, dropout draws for it. A
    `train_step` that optimises by itself (`context.backward`) cannot be cut; its error goes on.

    Attributes:
        micro_batch_size: The most samples that a training step computes at once; None while every batch has fitted.

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

    # The most samples that fitted, by what is computed.
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
        """The most samples that a training step computes at once; None while every batch has fitted."""
        return self._sizes.get("train")

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the loss of the whole batch; with micro-batches, all but the last are differentiated already."""
        step = super().train_step
        if self._is_inside_part or not self._is_active:
            return step(batch)
        gradients = _Gradients(self.context)

        def compute(size: int, length: int) -> Mapping[str, Any]:
            if size < length:
                return self._in_parts(step, batch, size, length, gradients)
            output = step(batch)
            return output if self.context.run.batch.optimized else self._letting_go(output, batch, gradients)

        if "train" in self._sizes:
            return self._fitting("train", batch, compute, gradients)
        # While every batch fits, a step takes the shortest way.
        try:
            output = step(batch)
            return output if self.context.run.batch.optimized else self._letting_go(output, batch, gradients)
        except Exception as error:
            failure = self._checked(error, batch)
        return self._fitting("train", batch, compute, gradients, failure=failure)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Refuse to differentiate a part for a step that would then make an update of it alone."""
        if self._is_inside_part:
            raise _ManualStepError(_MANUAL)
        super().backward(loss, **kwargs)

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the numbers of the whole batch."""
        return self._evaluated(batch, super().test_step, _joined)

    def predict_step(self, batch: Any) -> Any:
        """Return the predictions for the whole batch."""
        return self._evaluated(batch, super().predict_step, lambda outputs, lengths: concat(outputs))

    def state_dict(self) -> dict[str, Any]:
        """Add the sizes that fitted, so that a resumed run cuts the same batches."""
        return {**super().state_dict(), "auto_batch": dict(self._sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the sizes back."""
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
        """Return what `compute(size, length)` does, with the largest size that fits; smaller ones after a failure."""
        length = self.batch_length(batch)
        size = min(size or length, self._sizes.get(what, length), length)
        while True:
            # Outside of the handler, which holds the frames that hold what the failed attempt has computed.
            if failure is not None:
                if gradients is not None:
                    gradients.put_back()
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
                failure = self._checked(error, batch, size)
        if size < length:
            self._sizes[what] = size
        return result

    def _checked(self, error: Exception, batch: Any, size: int | None = None) -> Exception:
        """Return an error without its frames, or raise it if no smaller part of the batch would mend it."""
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

    def _evaluated(self, batch: Any, step: Callable[[Any], _T], join: Callable[..., _T]) -> _T:
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
        """Differentiate all micro-batches but the last, whose graph is that of the returned loss."""
        context, window = self.context, self.context.run.window
        bounds = _bounds(length, size)
        outputs: list[Mapping[str, Any]] = []
        expected: Any = None
        for start, stop in bounds:
            output = self._part(step, slice_batch(batch, start, stop, length))
            loss, num_items = output["loss"], _items(output, stop - start)
            if expected is None:
                # Items that are no samples are known after the last part only: until then the first one is typical.
                expected = num_items * (length / (stop - start)) if "num_items" in output else length
            if stop < length:
                # What the loop will divide by: this batch opens its window, or the window knows already.
                share = (
                    num_items / (expected * window.size)
                    if window.opens
                    else window.weight(num_items, first_of_batch=False)
                )
                assert context.run.trainer is not None
                context.run.trainer.backward(loss * share)
            outputs.append(map_tensors(Tensor.detach, output))
        joined = _joined(outputs, [stop - start for start, stop in bounds])
        total = _items(joined, length)
        if window.opens and (isinstance(total, Tensor) or total != expected):
            gradients.scale(expected / total)
        return self._letting_go(joined, batch, gradients, loss * (num_items / total), size)

    def _part(self, step: Callable[[Any], Mapping[str, Any]], part: Any) -> Mapping[str, Any]:
        self._is_inside_part = True
        try:
            output = step(part)
        finally:
            self._is_inside_part = False
        if self.context.run.batch.optimized:
            raise _ManualStepError(_MANUAL)
        return output

    def _letting_go(
        self,
        output: Mapping[str, Any],
        batch: Any,
        gradients: _Gradients,
        differentiated: Tensor | None = None,
        size: int | None = None,
    ) -> Mapping[str, Any]:
        """Return the output with a loss that holds no graph: the loop keeps it while the batch may be computed anew."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        source = loss if differentiated is None else differentiated
        if not isinstance(source, Tensor) or not isinstance(loss, Tensor) or not source.requires_grad:
            return output
        graph = [source]
        counted = {"num_items": output["num_items"]} if "num_items" in output else {}

        def differentiate(gradient: Tensor) -> None:
            try:
                graph.pop().backward(gradient)  # type: ignore[no-untyped-call]  # torch has no types for it
            except Exception as error:
                failure = self._checked(error, batch, size)
            else:
                gradients.copies = None
                return

            def compute(size: int, length: int) -> None:
                self._all_parts(batch, size, length, _items(counted, length), gradient)

            self._fitting("train", batch, compute, gradients, size=size, failure=failure)
            gradients.copies = None

        anchor = torch.zeros((), requires_grad=True)
        lent = _Lent.apply(anchor, loss.detach(), differentiate)  # type: ignore[no-untyped-call]  # torch has no types
        # Whatever else the step returned would hold the graph, too.
        return {**map_tensors(Tensor.detach, output), "loss": lent} if len(output) > 1 else {"loss": lent}

    def _all_parts(self, batch: Any, size: int, length: int, total: Any, gradient: Tensor) -> None:
        """Compute a batch anew, inside of the backward pass that failed: scale and weight are in `gradient` already."""
        assert self.context.run.trainer is not None
        for start, stop in _bounds(length, size):
            with torch.enable_grad():
                output = self._part(self.context.run.trainer.train_step, slice_batch(batch, start, stop, length))
            output["loss"].backward(gradient * (_items(output, stop - start) / total))


def find_batch_size(trainer: Trainer, data: Any = None, *, start: int = 16, limit: int | None = None) -> int:
    """Return the largest batch size whose training steps fit into memory; the trainer does not change.

    Sizes are doubled from `start` on until one does not fit, then the range between is halved. Each one is tried with
    one real update, of a trainer that is put back afterwards. Meanwhile a copy of weights and optimizer state lies
    in memory, so the answer is on the safe side.

    Args:
        trainer: The outermost layer, with a model.
        data: Training data of which the trainer forms batches itself, not a loader; None for what the trainer has.
        start: The size to try first.
        limit: The largest size to try; None for as many samples as there are.

    Raises:
        ConfigError: The trainer does not form the batches of this data, or nobody knows how much there is.

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
    with _trying(trainer, data, 1):
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
        # Nothing that failed yet: there is no upper end to halve towards.
        size = min(2 * size, most) if too_large > most else (largest + too_large) // 2
    return largest


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted, on any device.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


# What torch says on a CPU, on Apple's devices and by older libraries of CUDA, where it raises a plain RuntimeError.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

_MANUAL = (
    "the batch cannot be cut into micro-batches, because train_step optimises by itself: make smaller batches, or "
    "return the loss and leave backward and step to the loop"
)


class _ManualStepError(Exception):
    """A step that would make an update of a part of its batch."""


class _Lent(torch.autograd.Function):
    """A loss whose gradient somebody else passes on, so that holding the loss does not hold its graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, differentiate: Callable[[Tensor], None]) -> Tensor:
        ctx.differentiate = differentiate
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.differentiate(*gradients)
        return None, None, None


class _Gradients:
    """The gradients that a batch finds, to begin with them again.

    The first batch of a window finds none. Later ones add to what they find, in place and parameter by parameter, so
    that an error in the middle leaves sums of which nobody knows what is in them: only for those a copy is kept, until
    the batch is done.

    Attributes:
        copies: Of every parameter's gradient, None where there is none; None for a first batch, and after the last use.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._optimizers = context.optimizers
        self.copies: list[tuple[Tensor, Tensor | None]] | None = None
        if not context.run.window.opens:
            self.copies = [(it, None if it.grad is None else it.grad.clone()) for it in self._parameters()]

    def put_back(self) -> None:
        """Make them what they were."""
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
        """Multiply the gradients of a first batch."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _parameters(self) -> Iterator[Tensor]:
        return (it for optimizer in self._optimizers for group in optimizer.param_groups for it in group["params"])


def _bounds(length: int, size: int) -> list[tuple[int, int]]:
    """Cut `length` into parts of nearly the same size, of which none exceeds `size`."""
    # Nearly the same: a rest of one sample would be too little for BatchNorm.
    number = -(-length // size)
    edges = [length * index // number for index in range(number + 1)]
    return list(pairwise(edges))


def _joined(outputs: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> dict[str, Any]:
    """Return what a step would have returned for all the samples at once."""
    items = [_items(output, length) for output, length in zip(outputs, lengths, strict=True)]
    joined: dict[str, Any] = {}
    for name, first in outputs[0].items():
        values = [output[name] for output in outputs]
        if name == "num_items":
            joined[name] = sum(values)
        elif _is_number(first, may_have_dimensions=name == "loss"):
            weights = items if name == "loss" else lengths
            total = sum(weights)
            joined[name] = sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))
        else:
            joined[name] = concat(values)
    return joined


def _is_number(value: Any, *, may_have_dimensions: bool) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, (int, float))
    return value.ndim == 0 or (may_have_dimensions and value.numel() == 1)


def _items(output: Mapping[str, Any], length: int) -> Any:
    """What a loss is a mean of, as a number to divide by."""
    items = output.get("num_items", length)
    # A count of integers would be divided in float32, which is too coarse for a float64 loss.
    return items.double() if isinstance(items, Tensor) else items


def _free(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


@contextmanager
def _trying(trainer: Trainer, data: Any, size: int) -> Iterator[None]:
    """Let the trainer train with batches of a size, from the start of an epoch, and put everything back."""
    context, core = trainer.context, trainer.core
    with preserve_state(trainer, train=data):
        for layer in layers(trainer):
            if isinstance(layer, AutoBatch):
                layer._is_active = False
        context.progress = Progress()
        core.options.batch_size = size  # type: ignore[attr-defined]  # trainers of ours have it, an abstract one not
        context.callbacks = Callbacks([_BatchesOf(size), *own_callbacks(context)])
        yield


def _failure(trainer: Trainer, data: Any, size: int) -> BaseException | None:
    """Return the error of a step that ran out of memory, or None if it did not."""
    never = Batches(0)
    try:
        with _trying(trainer, data, size):
            trainer.fit(
                max_length=Batches(trainer.context.run.window.size), validation_period=never, checkpoint_period=never
            )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)
    return None


class _BatchesOf(Callback):
    """Makes sure that batches really have the size that is tried."""

    def __init__(self, size: int) -> None:
        self._size = size

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        assert context.run.trainer is not None
        length = context.run.trainer.batch_length(batch)
        if length != self._size and context.progress.batch == 0:
            raise ConfigError(
                f"find_batch_size: the batches have {length} samples, whatever batch_size is; give the data set "
                "instead of a loader, and leave out strategies that choose the size"
            )
