"""Optimizer strategies: SGD, Adam, AdamW, RMSprop, parameter groups, and clipping before every step.

Every optimizer here receives all parameters of the model, including frozen ones: torch skips a parameter without a
gradient, and a parameter that is unfrozen later is then trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from dovetail.clipping import Clipping
from dovetail.errors import ConfigError
from dovetail.trainers.catalog import optimizers
from dovetail.trainers.strategies.base import OptimizerStrategy, Strategy
from dovetail.trainers.strategies.nesting import Described, Nesting, shown

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


def learning_rate(lr: float | None, context: TrainingContext) -> float:
    """Return a learning rate; None means the rate of the configuration, or 0.01 without one."""
    return float(context.config.get("lr", 0.01)) if lr is None else lr


def make_optimizer(
    optimizer_class: type[Optimizer], model: nn.Module, context: TrainingContext, settings: Mapping[str, Any]
) -> Optimizer:
    """Return an optimizer of all parameters of a model; without a given `lr` it uses the configured rate."""
    build: Any = optimizer_class
    takes_lr = "lr" in inspect.signature(optimizer_class).parameters
    rate = {"lr": learning_rate(None, context)} if takes_lr else {}
    optimizer: Optimizer = build(_parameters(model), **{**rate, **settings})
    return optimizer


@dataclass(frozen=True, eq=False, repr=False)
class DefaultOptimizerStrategy(Described, OptimizerStrategy):
    """The given optimizer, or else the optimizer that the configuration names.

    Args:
        optimizer_fn: A callable of the model. None means `config["optimizer"]`, a registered name, with the arguments
            `config["parameters"]["optimizer"]`; without one, SGD.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> type(DefaultOptimizerStrategy().create_optimizer(nn.Linear(1, 1), TrainingContext())).__name__
        'SGD'
    """

    optimizer_fn: Callable[[nn.Module], Optimizer] | None = None

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        """Return the optimizer of a model."""
        if self.optimizer_fn is not None:
            return self.optimizer_fn(model)
        config = context.config
        optimizer_class = optimizers.get(config.get("optimizer", "SGD"))
        return make_optimizer(optimizer_class, model, context, config.get("parameters", {}).get("optimizer", {}))


@dataclass(frozen=True, eq=False, repr=False)
class TorchOptimizerStrategy(Described, OptimizerStrategy):
    """Base of strategies for a torch optimizer whose arguments are the fields of the strategy.

    Args:
        lr: The learning rate; None means the configured rate.
    """

    optimizer_class: ClassVar[Callable[..., Optimizer]]

    lr: float | None = None

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        """Return the optimizer of a model."""
        # The fields of the dataclass are the arguments of torch's class.
        settings = {**vars(self), "lr": learning_rate(self.lr, context)}
        return type(self).optimizer_class(_parameters(model), **settings)


@dataclass(frozen=True, eq=False, repr=False)
class SGDOptimizerStrategy(TorchOptimizerStrategy):
    """`torch.optim.SGD`; a learning rate of None means the configured rate.

    Example:
        >>> SGDOptimizerStrategy(lr=0.1, momentum=0.9).create_optimizer(nn.Linear(1, 1), None).defaults["momentum"]
        0.9
    """

    optimizer_class = torch.optim.SGD

    momentum: float = 0
    weight_decay: float = 0
    dampening: float = 0
    nesterov: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class AdamOptimizerStrategy(TorchOptimizerStrategy):
    """`torch.optim.Adam`; a learning rate of None means the configured rate.

    Example:
        >>> AdamOptimizerStrategy(lr=0.001).create_optimizer(nn.Linear(1, 1), None).defaults["betas"]
        (0.9, 0.999)
    """

    optimizer_class = torch.optim.Adam

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0
    amsgrad: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class AdamWOptimizerStrategy(TorchOptimizerStrategy):
    """`torch.optim.AdamW`; a learning rate of None means the configured rate.

    Example:
        >>> AdamWOptimizerStrategy(lr=0.001).create_optimizer(nn.Linear(1, 1), None).defaults["weight_decay"]
        0.01
    """

    optimizer_class = torch.optim.AdamW

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    amsgrad: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class RMSpropOptimizerStrategy(TorchOptimizerStrategy):
    """`torch.optim.RMSprop`; a learning rate of None means the configured rate.

    Example:
        >>> RMSpropOptimizerStrategy(lr=0.1).create_optimizer(nn.Linear(1, 1), None).defaults["alpha"]
        0.99
    """

    optimizer_class = torch.optim.RMSprop

    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0
    momentum: float = 0
    centered: bool = False


class ParameterGroupOptimizerStrategy(OptimizerStrategy):
    """One optimizer with individual settings for each parameter group.

    Args:
        optimizer_class: A class of `torch.optim`.
        parameter_groups_fn: Returns the groups of a model: dictionaries with `params` and, if they differ, `lr` and
            other settings.
        default_lr: The learning rate of groups without one; None means the configured rate.
        settings: Further arguments of the optimizer.

    Example:
        >>> strategy = ParameterGroupOptimizerStrategy(
        ...     torch.optim.SGD,
        ...     lambda model: [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}],
        ...     default_lr=0.1,
        ... )
        >>> [group["lr"] for group in strategy.create_optimizer(nn.Linear(1, 1), None).param_groups]
        [0.5, 0.1]
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        parameter_groups_fn: Callable[[nn.Module], Sequence[Mapping[str, Any]]],
        default_lr: float | None = None,
        **settings: Any,
    ) -> None:
        self.optimizer_class = optimizer_class
        self.parameter_groups_fn = parameter_groups_fn
        self.default_lr = default_lr
        self.settings = settings

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        """Return the optimizer of a model."""
        build: Any = self.optimizer_class
        # Copies, because torch adds its defaults to the dictionaries.
        groups = [dict(group) for group in self.parameter_groups_fn(model)]
        optimizer: Optimizer = build(groups, lr=learning_rate(self.default_lr, context), **self.settings)
        return optimizer

    def __repr__(self) -> str:
        rate = {} if self.default_lr is None else {"default_lr": self.default_lr}
        settings = [f"{name}={shown(value)}" for name, value in {**rate, **self.settings}.items()]
        pieces = [shown(self.optimizer_class), shown(self.parameter_groups_fn), *settings]
        return f"{type(self).__name__}({', '.join(pieces)})"


@dataclass(frozen=True, eq=False, repr=False)
class GradientClippingOptimizerStrategy(Nesting, OptimizerStrategy):
    """The optimizer of another strategy, with clipping of the gradient norm before every step.

    Gradients are complete and unscaled when they are clipped. The limit applies to each optimizer separately.

    Example:
        >>> strategy = GradientClippingOptimizerStrategy(SGDOptimizerStrategy(lr=1.0), max_norm=1.0)
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> from dovetail.trainers.context import TrainingContext
        >>> strategy.on_gradients(torch.optim.SGD([weight]), TrainingContext())
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """

    base_strategy: OptimizerStrategy
    max_norm: float = 1.0
    norm_type: float = 2.0
    clipping: Clipping = field(init=False)

    def __post_init__(self) -> None:
        clipping = Clipping("GradientClippingOptimizerStrategy", self.max_norm, norm_type=self.norm_type)
        # The dataclass is frozen.
        object.__setattr__(self, "clipping", clipping)

    @property
    def parts(self) -> Sequence[Strategy]:
        """The strategy that creates the optimizer."""
        return (self.base_strategy,)

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        """Return the optimizer of a model."""
        return self.base_strategy.create_optimizer(model, context)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Clip the gradients of the optimizer."""
        # First the strategy inside, so that its changes are clipped, too.
        self.base_strategy.on_gradients(optimizer, context)
        context.run.batch.gradient_norm = self.clipping.apply(optimizer)

    def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Forward the call to the inner strategy."""
        self.base_strategy.on_optimizer_step(optimizer, context)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to optimise")
    return parameters
