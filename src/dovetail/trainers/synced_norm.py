"""Batch normalisation over the batches of all processes: statistics and gradients that equal those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from dovetail.distributed import Group
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.window import positive


class NormSync:
    """Makes the batch norms of a model normalise by the batches of all processes, from `install` to `remove`.

    Torch's `SyncBatchNorm` accepts only tensors of accelerators, weights all processes alike in the backward pass, and
    counts the samples of a process that only computes along with the others. This class works on every device, weights
    the losses by their items as the average of the gradients does, and leaves idle processes out. No module is
    replaced, so the names in checkpoints do not change.

    Args:
        group: The processes.
        context: The context of the run: only batches of training are normalised together.
        weight: Returns the weight of this process's loss in the average of the gradients. Called in the backward pass.
    """

    def __init__(self, group: Group, context: TrainingContext, weight: Callable[[], Any]) -> None:
        self.group = group
        self.weight = weight
        self._context = context
        self._norms: list[_BatchNorm] = []

    @property
    def is_idle(self) -> bool:
        """True if this process has no batch left, and its running batch does not count."""
        return self._context.run.batch.is_idle

    @property
    def is_training(self) -> bool:
        """True if the run trains: the processes of an evaluation have different numbers of batches."""
        return self._context.stage == "train" and self._context.process.has_peers

    def install(self, model: nn.Module) -> None:
        """Replace the forward function of every batch norm."""
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                vars(module)["forward"] = _SyncedForward(module, self)
                self._norms.append(module)

    def remove(self) -> None:
        """Restore the forward functions."""
        for module in self._norms:
            vars(module).pop("forward", None)
        self._norms.clear()


class _SyncedForward:
    """The forward function of a batch norm during a run of several processes."""

    def __init__(self, module: _BatchNorm, sync: NormSync) -> None:
        self._module = module
        self._sync = sync
        # Not as a decorator of the method: this function imports a compiler, which takes a second.
        self._compute = torch.compiler.disable(self._normalize)  # type: ignore[no-untyped-call]  # torch has no types

    def __deepcopy__(self, memo: dict[int, Any]) -> _SyncedForward:
        # The copy of a model, such as an average of its weights, has the same group and its own module.
        return _SyncedForward(copy.deepcopy(self._module, memo), self._sync)

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._compute(inputs)
        return outputs

    def _normalize(self, inputs: Tensor) -> Tensor:
        module, sync = self._module, self._sync
        if not module.training or not sync.is_training:
            return type(module).forward(module, inputs)
        module._check_input_dim(inputs)  # type: ignore[no-untyped-call]  # torch has no types for it
        outputs, mean, variance = _SyncedNorm.apply(inputs, module.weight, module.bias, module.eps, sync)  # type: ignore[no-untyped-call]  # torch has no types for it
        if module.track_running_stats:
            _update(module, mean, variance)
        return outputs  # type: ignore[no-any-return]


def _update(module: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as `nn.BatchNorm` does."""
    momentum = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if momentum is None:
            # A cumulative average.
            momentum = 1.0 / float(module.num_batches_tracked)
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        if running is not None:
            running.lerp_(value.to(running.dtype), momentum or 0.0)


class _SyncedNorm(torch.autograd.Function):
    """Normalisation by the mean and variance of all processes.

    Returns the outputs, the mean, and the unbiased variance.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, sync: NormSync
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = inputs.to(_exact_type(inputs.dtype))
        dims, shape = _dims(inputs)
        count = 0 if sync.is_idle else inputs.numel() // max(inputs.shape[1], 1)
        own = values.new_zeros(2 * inputs.shape[1] + 1)
        if count:
            variance, mean = torch.var_mean(values, dims, correction=0)
            own = torch.cat([mean, variance * count, values.new_full([1], count)])
        # A sum of rows that only one process fills: means of different counts cannot be added.
        rows = own.new_zeros(sync.group.size, len(own))
        rows[sync.group.rank] = own
        sync.group.sum(rows)
        means, squares, counts = torch.split(rows, [inputs.shape[1], inputs.shape[1], 1], dim=1)
        total = counts.sum()
        # Reading the total would wait for the device. A memory plan reads conditions as true.
        has_several = count > 1 or total > 1
        if not has_several:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {tuple(inputs.shape)}"
            )
        mean = (means * counts).sum(dim=0) / total
        # The squares around the mean of each process, and those of these means around the common mean (Chan et al.).
        square = squares.sum(dim=0) + (counts * (means - mean).square()).sum(dim=0)
        inverse = torch.rsqrt(square / total + eps)
        outputs = (values - mean.view(shape)) * inverse.view(shape)
        if weight is not None:
            outputs = outputs * weight.view(shape)
        if bias is not None:
            outputs = outputs + bias.view(shape)
        variance = square / (total - 1)
        ctx.save_for_backward(inputs, weight, mean, inverse, total)
        ctx.sync, ctx.is_idle = sync, sync.is_idle
        ctx.mark_non_differentiable(mean, variance)
        return outputs.to(inputs.dtype), mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, inverse, total = ctx.saved_tensors
        dims, shape = _dims(inputs)
        outer = gradient.to(mean.dtype)
        normal = (inputs.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        by_bias, by_weight = outer.sum(dims), (outer * normal).sum(dims)
        by_inputs: Tensor | None = None
        if ctx.needs_input_grad[0]:
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            # The loss of one process depends on the inputs of all, through mean and variance. The average of the
            # gradients multiplies by the weight of the receiving process, so its weight is divided out here.
            own = 0.0 if ctx.is_idle else ctx.sync.weight()
            sums = _where_positive(own, torch.cat([by_bias, by_weight]) * own)
            ctx.sync.group.sum(sums)
            common, slope = (sums / (positive(own) * total)).chunk(2)
            by_inputs = (outer - common.view(shape) - normal * slope.view(shape)) * scale.view(shape)
            by_inputs = _where_positive(own, by_inputs).to(inputs.dtype)
        return (
            by_inputs,
            by_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            by_bias.to(weight.dtype if weight is not None else mean.dtype) if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _where_positive(weight: Any, values: Tensor) -> Tensor:
    """Return values, or zeros if a weight is 0; they may be NaN then."""
    if isinstance(weight, Tensor):
        # A condition of Python would wait for the device.
        return torch.where(weight > 0, values, 0.0)
    return values if weight > 0 else torch.zeros_like(values)


def _exact_type(dtype: torch.dtype) -> torch.dtype:
    # Sums in half precision would lose too much.
    return torch.promote_types(dtype, torch.float32)


def _dims(inputs: Tensor) -> tuple[list[int], list[int]]:
    """Return the dimensions of samples and positions, and the shape in which a value per channel fits the inputs."""
    return [0, *range(2, inputs.ndim)], [1, -1, *[1] * (inputs.ndim - 2)]
