"""FedSAM: clients search for flat minima with sharpness-aware steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.errors import ConfigError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.elsewhere import loss_elsewhere
from dovetail.federated.messages import Weights
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.training_step import Criterion, NestingStepStrategy

# The smallest norm that a gradient is divided by.
_LEAST = 1e-12


@dataclass(eq=False, repr=False)
class FedSAMStepStrategy(NestingStepStrategy):
    """The gradient of a batch is taken at w + ρ g/‖g‖, where g is the gradient of the same batch at w.

    Every batch is computed twice. The reported loss is the one at w + ρ g/‖g‖. The statistics of BatchNorm are those
    at w. It has the arguments of `FedSAM`, and `base_strategy`, the step inside (None for a plain one).

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 2.0)
        >>> step = FedSAMStepStrategy(rho=0.5)
        >>> squares = lambda outputs, labels: outputs.square().sum() / 2
        >>> loss = step.training_step(model, None, torch.ones(1, 1), None, squares, TrainingContext(model))
        >>> loss.backward()
        >>> model.weight.grad
        tensor([[2.5000]])
    """

    rho: float = 0.05

    vectorizes = True

    def __post_init__(self) -> None:
        expect(self.rho >= 0, "rho", "a number that is at least 0", self.rho)

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss at w + ρ g/‖g‖."""
        step = (model, optimizer, examples, labels, loss_criterion, context)
        here = super().loss(*step)
        if not self.rho or context.run.is_detached:
            return here
        # A step that called `backward` itself has freed the graph, and its gradient would be counted, too.
        if context.run.batch.optimized:
            raise ConfigError(
                f"FedSAMStepStrategy: {self.base_strategy!r} differentiates by itself, and its loss is needed at two "
                "places; let it return the loss"
            )
        if context.precision is not None:
            # An unscaled gradient may vanish in float16. Only its direction is used.
            here = context.precision.scale(here)
        moving = {name: value for name, value in model.named_parameters() if value.requires_grad}
        found = torch.autograd.grad(here.sum(), list(moving.values()), allow_unused=True)
        gradients = {name: it for name, it in zip(moving, found, strict=True) if it is not None}
        away = context.client.each(self._shift, gradients)
        there = {name: moving[name] + shift for name, shift in away.items()}
        return loss_elsewhere(model, there, super().loss, *step)

    def _shift(self, gradients: Weights) -> dict[str, Tensor]:
        squares = [gradient.square().sum() for gradient in gradients.values()]
        # ‖g‖ is the norm over all parameters as one vector, as in the paper; not one norm per tensor.
        norm = sum(squares[1:], start=squares[0]).sqrt()
        return {name: gradient * (self.rho / norm.clamp(min=_LEAST)) for name, gradient in gradients.items()}


@dataclass(eq=False, repr=False)
class FedSAM(StrategyAlgorithm):
    """FedAvg whose clients step with the gradient at w + ρ g/‖g‖ (Qu et al., 2022).

    Args:
        rho: ρ, at least 0; 0 is FedAvg.

    Example:
        >>> FedSAM(rho=0.1)
        FedSAM(rho=0.1)
    """

    rho: float = 0.05

    decides = ("how a batch is computed",)
    client_strategies: ClassVar = {"training_step": FedSAMStepStrategy}
