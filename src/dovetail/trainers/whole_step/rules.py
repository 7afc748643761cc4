"""Update rules of optimizers, as operations that a graph can contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from dovetail.trainers.whole_step.any_optimizer import TracedRule, fitting, has_own_rule, initial_state
from dovetail.trainers.whole_step.gradients import AccumulationRule, GradientBuffers

Group = Mapping[str, Any]


class Rule(Protocol):
    """Update rule of an optimizer: its terms determine the graph, its numbers are inputs of the graph."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that determine terms and numbers, besides `lr`."""

    def terms(self, group: Group) -> tuple[Any, ...]:
        """Return which terms the update has."""

    def numbers(self, group: Group) -> tuple[float, ...]:
        """Return the numbers that a schedule may change."""

    def slots(self, optimizer: Optimizer, parameter: nn.Parameter, terms: tuple[Any, ...]) -> tuple[str, ...]:
        """Return the names of a parameter's state."""

    def weighted(self, loss: Tensor, outputs: Mapping[str, Any], numbers: Sequence[Tensor], terms: Any) -> Tensor:
        """Return the loss for the backward pass."""

    def update(
        self,
        optimizer: Optimizer,
        group: Group,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[Tensor],
        terms: Any,
    ) -> None:
        """Change the parameters of a group and their states in place."""


class WrittenRule(Rule):
    """Rule that changes one parameter after the other."""

    def weighted(self, loss: Tensor, outputs: Mapping[str, Any], numbers: Sequence[Tensor], terms: Any) -> Tensor:
        return loss

    def update(
        self,
        optimizer: Optimizer,
        group: Group,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[Tensor],
        terms: Any,
    ) -> None:
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            self.update_one(parameter, gradient, state, numbers, terms)

    def update_one(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Sequence[Tensor], terms: Any
    ) -> None:
        """Change a parameter and its state in place."""
        raise NotImplementedError


class SGDRule(WrittenRule):
    """Stochastic gradient descent with torch's momentum, whose first value is the gradient."""

    settings = ("momentum", "nesterov", "weight_decay", "maximize")

    def terms(self, group: Group) -> tuple[bool, ...]:
        return bool(group["momentum"]), group["nesterov"], bool(group["weight_decay"]), group["maximize"]

    def numbers(self, group: Group) -> tuple[float, ...]:
        return float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])

    def slots(self, optimizer: Optimizer, parameter: nn.Parameter, terms: tuple[Any, ...]) -> tuple[str, ...]:
        return ("momentum_buffer",) if terms[0] else ()

    def update_one(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Sequence[Tensor], terms: Any
    ) -> None:
        has_momentum, is_nesterov, decays, maximizes = terms
        rate, momentum, decay = (fitting(it, parameter) for it in numbers)
        if maximizes:
            gradient = -gradient
        if decays:
            gradient = gradient + parameter * decay
        if has_momentum:
            # The buffer starts with zeros, so the first average is the gradient, as in torch.
            average = state["momentum_buffer"].mul_(momentum).add_(gradient)
            gradient = gradient + average * momentum if is_nesterov else average
        parameter.sub_(gradient * rate)


class AdamRule(WrittenRule):
    """Adam, and AdamW, whose weight decay is decoupled from the gradient."""

    settings = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize")

    def terms(self, group: Group) -> tuple[bool, ...]:
        return bool(group["weight_decay"]), group["decoupled_weight_decay"], group["amsgrad"], group["maximize"]

    def numbers(self, group: Group) -> tuple[float, ...]:
        first, second = group["betas"]
        return float(group["lr"]), float(first), float(second), float(group["eps"]), float(group["weight_decay"])

    def slots(self, optimizer: Optimizer, parameter: nn.Parameter, terms: tuple[Any, ...]) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if terms[2] else ()))

    def update_one(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Sequence[Tensor], terms: Any
    ) -> None:
        decays, is_decoupled, is_amsgrad, maximizes = terms
        rate, first, second, epsilon, decay = numbers
        if maximizes:
            gradient = -gradient
        if decays and is_decoupled:
            parameter.mul_(fitting(1 - rate * decay, parameter))
        elif decays:
            gradient = gradient + parameter * fitting(decay, parameter)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.add_((gradient - mean) * fitting(1 - first, parameter))
        square.mul_(fitting(second, parameter)).add_(gradient * gradient * fitting(1 - second, parameter))
        step = state["step"].add_(1)
        step = fitting(step, step)
        root = (square if not is_amsgrad else _largest(state["max_exp_avg_sq"], square)).sqrt()
        correction = fitting(_one_minus_power(second, step).sqrt(), parameter)
        bias = _one_minus_power(first, step)
        size, epsilon = fitting(rate.to(bias.dtype) / bias, parameter), fitting(epsilon, parameter)
        if parameter.numel() >= _LARGE:
            correction, size = _stored(correction), _stored(size)
        parameter.sub_(mean / (root / correction + epsilon) * size)


class AdafactorRule(WrittenRule):
    """Adafactor as in torch: variances of rows and columns of matrices, and of all elements of vectors.

    Torch's own code reads the norms of parameters and updates on the host. Here they are tensors.
    """

    settings = ("beta2_decay", "eps", "d", "weight_decay", "maximize")

    def terms(self, group: Group) -> tuple[Any, ...]:
        return bool(group["weight_decay"]), group["maximize"], group["beta2_decay"], *group["eps"], group["d"]

    def numbers(self, group: Group) -> tuple[float, ...]:
        return float(group["lr"]), float(group["weight_decay"])

    def slots(self, optimizer: Optimizer, parameter: nn.Parameter, terms: tuple[Any, ...]) -> tuple[str, ...]:
        return ("step", "row_var", "col_var") if parameter.ndim > 1 else ("step", "variance")

    def update(
        self,
        optimizer: Optimizer,
        group: Group,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[Tensor],
        terms: Any,
    ) -> None:
        decays, maximizes, power, smallest, *rest = terms
        if smallest is None and parameters:
            # As in torch, the type of the first parameter counts for the whole group.
            smallest = torch.finfo(parameters[0].dtype).eps
        terms = decays, maximizes, power, smallest, *rest
        super().update(optimizer, group, parameters, gradients, states, numbers, terms)

    def update_one(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Sequence[Tensor], terms: Any
    ) -> None:
        decays, maximizes, power, smallest, least_size, threshold = terms
        rate, decay = numbers
        if maximizes:
            gradient = -gradient
        # In double precision, as Python computes them for torch.
        step = state["step"].add_(1)
        step = fitting(step, step)
        weight, size = fitting(step**power, parameter), torch.minimum(rate.to(step.dtype), 1 / step.sqrt())
        size = _mean_root(parameter).clamp(min=least_size) * fitting(size, parameter)
        if decays:
            parameter.mul_(fitting(1 - rate * decay, parameter))
        if gradient.ndim > 1:
            rows, columns = state["row_var"], state["col_var"]
            for variance, dimension in ((rows, -1), (columns, -2)):
                norm = torch.linalg.vector_norm(gradient, dim=dimension, keepdim=True)
                variance.add_((norm.square() / gradient.shape[dimension] - variance) * weight)
            square = rows * columns / rows.mean(dim=-2, keepdim=True).clamp(min=smallest)
        else:
            square = state["variance"]
            square.add_((gradient * gradient - square) * weight)
        change = gradient * square.clamp(min=smallest * smallest).rsqrt()
        size = size / (_mean_root(change) / threshold).clamp(min=1.0)
        parameter.sub_(change * (size if parameter.numel() < _LARGE else _stored(size)))


def _mean_root(values: Tensor) -> Tensor:
    """Return the root of the mean square of all elements."""
    mean: Tensor = fitting(torch.linalg.vector_norm(values), values) / values.numel() ** 0.5
    return mean


# From this number of elements on, memory for a number takes less time than to compute it again for every 16 elements.
_LARGE = 2048


def _one_minus_power(base: Tensor, step: Tensor) -> Tensor:
    """Return `1 - base**step` in full precision, on the device and in the type of the step."""
    if step.dtype is torch.float64:
        # As Python computes it for torch.
        return 1 - base**step
    # In single precision 1 - 0.999 has four exact digits.
    return -torch.expm1(fitting(base.log(), step) * step)


def _stored(number: Tensor) -> Tensor:
    """Return a number unchanged, as a sum with zero: Inductor stores sums.

    It inlines other expressions, and would compute their powers again for every 16 elements of a parameter.
    """
    return torch.stack((number, torch.zeros_like(number))).sum()


def _largest(largest: Tensor, square: Tensor) -> Tensor:
    return largest.copy_(torch.maximum(largest, square))


# AdamW is an Adam whose groups set `decoupled_weight_decay`.
RULES: dict[type[Optimizer], Rule] = {
    SGD: SGDRule(),
    Adam: AdamRule(),
    AdamW: AdamRule(),
    Adafactor: AdafactorRule(),
    GradientBuffers: AccumulationRule(),
}


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule of an optimizer, or None if no graph can contain its update."""
    # The exact class: a subclass may change the update.
    if type(optimizer) in RULES:
        return RULES[type(optimizer)]
    return TracedRule(optimizer) if has_own_rule(type(optimizer)) else None


def checked_rule(optimizer: Optimizer) -> Rule:
    """Return the rule of an optimizer that `check_optimizer` has accepted."""
    rule = rule_of(optimizer)
    assert rule is not None, "check_optimizer accepts an optimizer without a rule"
    return rule


def state_of(optimizer: Optimizer, parameter: nn.Parameter, slot: str) -> Tensor:
    """Return a part of a parameter's state; if it does not exist yet, the initial value that torch would use."""
    if parameter in optimizer.state and slot in optimizer.state[parameter]:
        known: Tensor = optimizer.state[parameter][slot]
        return known
    if type(optimizer) not in RULES or type(optimizer) is Adafactor:
        return initial_state(optimizer, parameter)[slot]
    if slot != "step":
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    # `step` has the device and the dtype that torch's own first step would choose.
    group = next(group for group in optimizer.param_groups if any(it is parameter for it in group["params"]))
    is_there = group["capturable"] or group["fused"]
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 and not group["fused"] else torch.float32
    return torch.zeros((), dtype=dtype, device=parameter.device if is_there else "cpu")


def clipped(gradients: Mapping[nn.Parameter, Tensor], max_norm: float) -> dict[nn.Parameter, Tensor]:
    """Return gradients clipped like `clip_grad_norm_`."""
    if not gradients:
        return {}
    factor = clip_factor([torch.linalg.vector_norm(it) for it in gradients.values()], max_norm)
    return {parameter: gradient * factor for parameter, gradient in gradients.items()}


def clip_factor(norms: Sequence[Tensor], max_norm: float) -> Tensor:
    """Return the factor by which `clip_grad_norm_` scales gradients.

    Args:
        norms: The norm of each gradient; for several models at once, one norm per model in each tensor.
        max_norm: The largest norm of all gradients of a model together.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack([*norms]), dim=0)
    # The constants of `clip_grad_norm_`.
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
