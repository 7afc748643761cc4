"""FedMos: variance-reduced momentum for local steps, and a pull to their starting point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.errors import ConfigError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.elsewhere import loss_elsewhere
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.anchored import Anchored
from dovetail.trainers.strategies.base import ModelUpdateStrategy, OptimizerStrategy, Strategy
from dovetail.trainers.strategies.nesting import Described, Nesting
from dovetail.trainers.strategies.optimizer import learning_rate
from dovetail.trainers.strategies.training_step import Criterion, NestingStepStrategy


class FedMosOptimizer(Optimizer):
    """x ← x − η d_t, then x ← x − μ (x − x₀), where x₀ is a parameter before its first step.

    d₀ is the first gradient, and d_t = a g_t + (1 − a) d_{t−1} is a moving average. With `is_corrected`, the gradients
    are g_t − (1 − a) g'_t, which `FedMosStepStrategy` computes, and (1 − a) d_{t−1} is added to them.

    Args:
        params: Parameters, or groups of them.
        lr: η.
        a: How much of d is new in a step, from 0 to 1.
        mu: μ: how far back a step is pulled, from 0 to 1.

    Attributes:
        is_corrected: True if gradients contain their correction.
        pulls: True if parameters are pulled to x₀.

    Example:
        >>> weight = nn.Parameter(torch.tensor(1.0))
        >>> optimizer = FedMosOptimizer([weight], lr=0.5, a=0.5, mu=0.5)
        >>> weight.grad = torch.tensor(1.0)
        >>> optimizer.step()
        >>> weight.item()
        0.75
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float, a: float = 1.0, mu: float = 0.0
    ) -> None:
        _check(a, mu)
        expect(lr >= 0, "lr", "a number that is at least 0", lr)
        super().__init__(params, {"lr": lr, "a": a, "mu": mu})
        self.is_corrected = False
        self.pulls = True

    def previous(self) -> dict[Tensor, tuple[Tensor, float]]:
        """Return x_{t−1} and a of every parameter that was stepped, except those with a = 1, which do not need it."""
        return {
            parameter: (self.state[parameter]["previous"], group["a"])
            for group in self.param_groups
            for parameter in group["params"]
            if group["a"] != 1 and parameter in self.state
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "is_corrected": self.is_corrected, "pulls": self.pulls}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, **{name: group[name] for name in ("lr", "a", "mu")})
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, lr: float, a: float, mu: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = gradient.clone()
            state["start"], state["previous"] = parameter.clone(), parameter.clone()
        else:
            # A corrected gradient is g_t − (1 − a) g'_t already, so it is added as a whole.
            state["momentum"].mul_(1 - a).add_(gradient, alpha=1 if self.is_corrected else a)
            state["previous"].copy_(parameter)
        parameter.add_(state["momentum"], alpha=-lr)
        if mu and self.pulls:
            # x − μ (x − x₀)
            parameter.lerp_(state["start"], mu)


@dataclass(eq=False, repr=False)
class FedMosOptimizerStrategy(Nesting, OptimizerStrategy):
    """Creates a `FedMosOptimizer`; it has the arguments of `FedMos`, and `base_strategy`.

    If `base_strategy` is given, the groups and learning rates of its optimizer are used. None means one group with all
    parameters, and the learning rate of the configuration if `lr` is None.

    Example:
        >>> FedMosOptimizerStrategy(lr=0.1, a=0.5).create_optimizer(nn.Linear(1, 1), None).defaults["a"]
        0.5
    """

    lr: float | None = None
    a: float = 0.9
    mu: float = 0.9
    base_strategy: OptimizerStrategy | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.a, self.mu)

    @property
    def parts(self) -> Sequence[Strategy]:
        return () if self.base_strategy is None else (self.base_strategy,)

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        if self.base_strategy is None:
            return FedMosOptimizer(model.parameters(), learning_rate(self.lr, context), self.a, self.mu)
        groups = [
            {"params": group["params"], "lr": group["lr"] if self.lr is None else self.lr}
            for group in self.base_strategy.create_optimizer(model, context).param_groups
        ]
        return FedMosOptimizer(groups, groups[0]["lr"], self.a, self.mu)

    def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Call the strategy inside."""
        if self.base_strategy is not None:
            self.base_strategy.on_optimizer_step(optimizer, context)


@dataclass(eq=False, repr=False)
class FedMosOptimizerStrategyFromConfig(FedMosOptimizerStrategy):
    """`FedMosOptimizer` with the `a` and `mu` of the configuration, under `algorithm`.

    Example:
        >>> FedMosOptimizerStrategyFromConfig(lr=0.1)
        FedMosOptimizerStrategyFromConfig(lr=0.1)
    """

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        told = context.config.get("algorithm", {})
        self.a, self.mu = float(told.get("a", self.a)), float(told.get("mu", self.mu))
        return super().create_optimizer(model, context)


@dataclass(eq=False, repr=False)
class FedMosUpdateStrategy(Anchored, Described, ModelUpdateStrategy):
    """Resets `FedMosOptimizer` at the start of every run: its momentum, and the weights that it pulls to.

    While a client trains its personal model, nothing is pulled.

    Example:
        >>> FedMosUpdateStrategy()
        FedMosUpdateStrategy()
    """

    def capture(self, context: TrainingContext) -> bool:
        """Clear the state of the optimizers from another run."""
        for optimizer in context.optimizers:
            if isinstance(optimizer, FedMosOptimizer):
                optimizer.state.clear()
        return True

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Pull only in steps of the model that is sent."""
        if isinstance(optimizer, FedMosOptimizer):
            optimizer.pulls = not context.run.is_detached


@dataclass(eq=False, repr=False)
class FedMosStepStrategy(NestingStepStrategy):
    """Computes every batch also at the weights x_{t−1} of the last step: d_t = g_t + (1 − a)(d_{t−1} − g'_t).

    One backward pass of both losses gives g_t − (1 − a) g'_t, so that accumulation, precision and clipping see one
    gradient, and `FedMosOptimizer` adds (1 − a) d_{t−1}. With another optimizer it is a plain step.

    Args:
        reuse_gradient: Use g_t in place of g'_t, so that a batch is computed once: d_t = a g_t + (1 − a) d_{t−1}.
        base_strategy: The step inside; None for a plain one.

    Example:
        >>> FedMosStepStrategy(reuse_gradient=True)
        FedMosStepStrategy(reuse_gradient=True)
    """

    reuse_gradient: bool = False

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        for optimizer in context.optimizers:
            if isinstance(optimizer, FedMosOptimizer):
                optimizer.is_corrected = not self.reuse_gradient

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch; its gradient includes the correction."""
        step = (model, optimizer, examples, labels, loss_criterion, context)
        now = super().loss(*step)
        previous = optimizer.previous() if isinstance(optimizer, FedMosOptimizer) and not self.reuse_gradient else {}
        if not previous:
            return now
        if context.run.batch.optimized:
            raise ConfigError(
                f"FedMosStepStrategy: {self.base_strategy!r} differentiates by itself, and its loss is needed at two "
                "places; let it return the loss"
            )
        # Constants plus (1 − a) times zero: their gradient is (1 − a) times the gradient at x_{t−1}.
        there = {}
        for name, parameter in model.named_parameters():
            if parameter in previous:
                value, a = previous[parameter]
                there[name] = value + (1 - a) * (parameter - parameter.detach())
        # The value of the loss stays the one at x_t; only its gradient gets −(1 − a) g'_t.
        before = loss_elsewhere(model, there, super().loss, *step)
        return now - (before - before.detach())


@dataclass(eq=False, repr=False)
class FedMos(StrategyAlgorithm):
    """FedAvg with two momenta at clients: variance-reduced, and to the initial weights (Wang et al., 2023).

    d_t = g(x_t; ξ_t) + (1 − a)(d_{t−1} − g(x_{t−1}; ξ_t)), x ← x − η d_t, x ← x − μ (x − wᵗ).

    Args:
        lr: η. None means the learning rates of the client's optimizer, which is replaced.
        a: The share of the new gradient in d, from 0 to 1.
        mu: μ, how far a step is pulled back, from 0 to 1; `a=1, mu=0` is FedAvg with SGD.
        reuse_gradient: Compute every batch only once: d is then a moving average of gradients.

    Example:
        >>> FedMos(a=0.5)
        FedMos(a=0.5)
    """

    lr: float | None = None
    a: float = 0.1
    mu: float = 0.001
    reuse_gradient: bool = False

    decides = ("which optimizer clients use", "how a batch is computed")
    client_strategies: ClassVar = {
        "optimizer": FedMosOptimizerStrategy,
        "training_step": FedMosStepStrategy,
        "model_update": FedMosUpdateStrategy,
    }


def _check(a: float, mu: float) -> None:
    for name, value in (("a", a), ("mu", mu)):
        expect(0 <= value <= 1, name, "a number from 0 to 1", value)
