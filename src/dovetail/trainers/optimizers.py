"""Optimizers LARS and AdaHessian, and functions for any optimizer."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.errors import ConfigError


class LARS(Optimizer):
    """SGD with momentum whose rate is scaled per tensor by the ratio of weight to gradient (You et al., 2017).

    The local rate is η·‖w‖ / (‖g‖ + β‖w‖); a tensor whose weights or gradients are all zero moves at the plain rate.

    Args:
        params: Parameters or parameter groups.
        lr: The global rate.
        momentum: Momentum factor.
        weight_decay: β, the weight decay.
        trust_coefficient: η.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1)
        >>> weight.grad = torch.tensor([0.0, 2.0])
        >>> _ = optimizer.step()
        >>> weight.detach()
        tensor([3.0000, 3.5000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else _with_gradients(closure)
        for group in self.param_groups:
            decay, momentum = group["weight_decay"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                size, slope = weight.norm(), weight.grad.norm()
                local = group["trust_coefficient"] * size / (slope + decay * size)
                # On the device: an `if` would wait for the norms of every tensor.
                local = torch.where((size > 0) & (slope > 0), local, torch.ones_like(local))
                move = group["lr"] * local * (weight.grad + decay * weight)
                if momentum:
                    state = self.state[weight]
                    kept = state.get("momentum_buffer")
                    move = state["momentum_buffer"] = move if kept is None else kept.mul_(momentum).add_(move)
                weight.sub_(move)
        return loss


class AdaHessian(Optimizer):
    """Adam with the diagonal of the Hessian in place of squared gradients (Yao et al., 2021).

    The diagonal is Hutchinson's estimate, one product with a random sign vector per step, averaged over the
    neighbouring weights of a convolution's kernel. So gradients must be differentiable themselves: train with
    `DefaultTrainingStepStrategy(create_graph=True)`.

    Args:
        params: Parameters or parameter groups.
        lr: The rate.
        betas: The decay rates of the means of gradients and of curvatures.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay, as in AdamW.
        hessian_power: 1 for the full curvature, 0 for none.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = AdaHessian([weight], lr=0.5)
        >>> loss = (torch.tensor([1.0, 10.0]) * weight.square()).sum()
        >>> (weight.grad,) = torch.autograd.grad(loss, [weight], create_graph=True)
        >>> _ = optimizer.step()
        >>> weight.detach()
        tensor([0.5000, 1.0000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.15,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4,
        weight_decay: float = 0.0,
        hessian_power: float = 1.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "hessian_power": hessian_power}
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Estimate the curvature, and update every parameter that has a gradient.

        Raises:
            ConfigError: The gradients cannot be differentiated.
        """
        loss = None if closure is None else _with_gradients(closure)
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        if not weights:
            return loss
        if not all(weight.grad is not None and weight.grad.requires_grad for weight in weights):
            raise ConfigError(
                "AdaHessian needs gradients with a graph: use DefaultTrainingStepStrategy(create_graph=True)"
            )
        curvature = dict(zip(weights, _diagonal(weights), strict=True))
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight in curvature:
                        self._update(weight, curvature[weight], group)
        return loss

    def _update(self, weight: Tensor, curvature: Tensor, group: dict[str, Any]) -> None:
        """Update one weight with the mean of its gradients, scaled by the mean of its curvatures."""
        assert weight.grad is not None
        first, second = group["betas"]
        state = self.state[weight]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weight), exp_hessian_sq=torch.zeros_like(weight))
        state["step"] += 1
        state["exp_avg"].lerp_(weight.grad.detach(), 1 - first)
        state["exp_hessian_sq"].lerp_(curvature.square(), 1 - second)
        # The bias correction of Adam: both means start at zero.
        mean = state["exp_avg"] / (1 - first ** state["step"])
        scale = (state["exp_hessian_sq"] / (1 - second ** state["step"])).sqrt() ** group["hessian_power"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] * mean / (scale + group["eps"]))


def _diagonal(weights: list[Tensor]) -> list[Tensor]:
    """Return an estimate of the Hessian's diagonal for each weight, from one random product."""
    signs = [torch.randint_like(weight, 0, 2) * 2 - 1 for weight in weights]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    products = torch.autograd.grad(gradients, weights, signs, allow_unused=True)
    estimates = []
    for weight, product, sign in zip(weights, products, signs, strict=True):
        # A loss that is linear in a weight has no curvature there.
        estimate = torch.zeros_like(weight) if product is None else (product * sign).abs().detach()
        if weight.ndim == 4:
            estimate = estimate.mean(dim=(2, 3), keepdim=True).expand_as(weight)
        estimates.append(estimate)
    return estimates


def _with_gradients(closure: Callable[[], Any]) -> Any:
    # `LARS.step` runs without gradients, but the closure computes them.
    with torch.enable_grad():
        return closure()


def twin_of(optimizer: Optimizer, twins: Mapping[Tensor, Tensor]) -> Optimizer:
    """Return an optimizer of the same kind and settings, without state, for other parameters.

    Args:
        optimizer: The optimizer to copy.
        twins: The replacement of each parameter; parameters without one are left out.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> own, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
        >>> twin_of(torch.optim.SGD([own], lr=0.5, momentum=0.9), {own: other}).param_groups[0]["momentum"]
        0.9
    """
    # A shallow copy: only the parameter groups and the state are new.
    twin = copy.copy(optimizer)
    twin.param_groups = [
        {**group, "params": [twins[parameter] for parameter in group["params"] if parameter in twins]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    return twin


def requires_closure(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` needs a function that evaluates the loss."""
    # Inspect the class: a scheduler replaces the `step` of the instance with a wrapper.
    return _requires_closure(type(optimizer).step)


@cache
def _requires_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the state of an optimizer of torch has a value per element, and a few numbers per parameter."""
    return type(optimizer).__module__.startswith("torch.optim.") and type(optimizer).__name__ in _ELEMENTWISE


_ELEMENTWISE = {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}


def state_bytes(optimizer: Optimizer) -> int | None:
    """Return the bytes of the optimizer's state; before the first step, of the state after it, or None if unknown."""
    if optimizer.state:
        return sum(map(_bytes_of, optimizer.state.values()))
    if not is_elementwise(optimizer):
        return None
    total = 0
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        for dtype in {parameter.dtype for parameter in trained}:
            # A step with a tiny parameter shows the bytes per element and per parameter.
            example = torch.zeros(2, dtype=dtype, requires_grad=True)
            example.grad = torch.zeros(2, dtype=dtype)
            trial = copy.copy(optimizer)
            trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [example]}]
            trial.step()
            values = [it for it in trial.state[example].values() if isinstance(it, Tensor)]
            for parameter in trained:
                if parameter.dtype is dtype:
                    total += sum(it.element_size() * (parameter.numel() if it.numel() == 2 else 1) for it in values)
    return total


def _bytes_of(state: Any) -> int:
    values = state.values() if isinstance(state, Mapping) else (state,)
    return sum(it.numel() * it.element_size() for it in values if isinstance(it, Tensor))
