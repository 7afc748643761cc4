"""APFL: each client uses a mixture of the global model and of a personal one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Optimizer

from dovetail.data.batches import map_tensors
from dovetail.errors import ConfigError, UnknownNameError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.own_model import ModelFunction, WithWeights, first_own_model
from dovetail.federated.messages import Weights
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.optimizers import twin_of
from dovetail.trainers.strategies.anchored import model_parameters
from dovetail.trainers.strategies.base import ModelUpdateStrategy
from dovetail.trainers.strategies.nesting import Described
from dovetail.trainers.strategies.training_step import Criterion, NestingStepStrategy, Options, SplitStepStrategy

# The keys of v and α in the state of a client, and of whether α is trained in the state of a run.
_KEY, _ADAPTS = "apfl", "apfl_adapts_alpha"
_MIXES = ("parameters", "outputs")


@dataclass(eq=False, repr=False)
class APFLUpdateStrategy(Described, ModelUpdateStrategy):
    """Stores the personal model v of a client, and the weight α with which it is mixed with the global model w.

    `APFLStepStrategy` trains both. The client uses v̄ = α v + (1 − α) w: α = 1 is the personal model alone, α = 0 the
    global one. It has the arguments of `APFL`, and `model_fn`, which builds the initial v (None for the first
    received model).

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> from dovetail.trainers.reuse import equip
        >>> trainer = ComposableTrainer(nn.Linear(2, 2), verbose=False)
        >>> equip(trainer, model_update=APFLUpdateStrategy(alpha=0.3), training_step=APFLStepStrategy())
        >>> _ = trainer.fit((torch.randn(8, 2), torch.zeros(8, dtype=torch.long)))
        >>> sorted(trainer.context.client.state["apfl"])
        ['alpha', 'v']
    """

    vectorizes = True

    alpha: float = 0.5
    adaptive_alpha: bool = True
    model_fn: ModelFunction | None = None

    def __post_init__(self) -> None:
        expect(0 <= self.alpha <= 1, "alpha", "a number from 0 to 1", self.alpha)

    def on_prepare(self, context: TrainingContext) -> None:
        """Initialize v with w before a client's first run."""
        if _KEY not in context.client.state:
            own = first_own_model(context, self.model_fn)
            first = next(iter(model_parameters(context).values()))
            # Steps of α are smaller than the resolution of half precision.
            dtype = torch.promote_types(first.dtype, torch.float32)
            context.client.state[_KEY] = {"v": own, "alpha": torch.tensor(self.alpha, dtype=dtype, device=first.device)}

    def on_train_start(self, context: TrainingContext) -> None:
        context.state[_ADAPTS] = self.adaptive_alpha

    def personal_weights(self, context: TrainingContext) -> Mapping[str, Tensor] | None:
        """Return the mixture; its buffers, such as the statistics of BatchNorm, are its own."""
        kept = context.client.state.get(_KEY)
        if kept is None:
            return None
        sent = {name: value.detach() for name, value in model_parameters(context).items()}
        own = {name: kept["v"][name] for name in sent}
        return {**kept["v"], **context.client.each(_mixed, own, sent, kept["alpha"])}


@dataclass(eq=False, repr=False)
class APFLUpdateStrategyFromConfig(APFLUpdateStrategy):
    """APFL with the `alpha` and `adaptive_alpha` of the configuration, under `algorithm`.

    Example:
        >>> APFLUpdateStrategyFromConfig()
        APFLUpdateStrategyFromConfig()
    """

    def on_prepare(self, context: TrainingContext) -> None:
        """Read the configuration of the run."""
        told = context.config.get("algorithm", {})
        self.alpha = float(told.get("alpha", self.alpha))
        self.adaptive_alpha = bool(told.get("adaptive_alpha", self.adaptive_alpha))
        super().on_prepare(context)


@dataclass(eq=False, repr=False)
class APFLStepStrategy(NestingStepStrategy):
    """Trains w by ∇f(w) and v by α ∇f(v̄) on the same batch, where v̄ = α v + (1 − α) w before the step.

    With `adaptive_alpha` of `APFLUpdateStrategy`, the first update of a round also trains α: α ← α − η ⟨v − w, ∇f(v̄)⟩,
    clamped to 0…1. w is trained exactly as without APFL if the model draws no random numbers. v has
    an optimizer of the same kind and rate as w, which is new in every round.

    Args:
        mix: `"parameters"`, as in the paper, or `"outputs"`: α v(x) + (1 − α) w(x).
        base_strategy: The step of both models; None for a plain one. It is called with w and with v̄, so it must have
            no effect besides the loss that it returns.

    Example:
        >>> APFLStepStrategy(mix="outputs")
        APFLStepStrategy(mix='outputs')
    """

    vectorizes = True

    mix: Literal["parameters", "outputs"] = "parameters"

    # v and α as leaf tensors, which share the memory of the client's state, and their optimizers.
    _own: dict[str, Tensor] = field(default_factory=dict, init=False)
    _alpha: Tensor = field(default_factory=lambda: torch.zeros(1), init=False)
    _twins: list[Optimizer] = field(default_factory=list, init=False)
    _alpha_optimizer: SGD | None = field(default=None, init=False)
    # The states of the twins from a checkpoint, until a run resumes with them.
    _loaded: list[Any] | None = field(default=None, init=False)
    _run_id: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if self.mix not in _MIXES:
            raise UnknownNameError("mix", self.mix, _MIXES)

    def setup(self, context: TrainingContext) -> None:
        """Set up the step inside.

        Raises:
            ConfigError: It cannot compute the losses of two models.
        """
        base = self.base_strategy
        if base is not None and not isinstance(base, SplitStepStrategy):
            raise ConfigError(
                f"base_strategy: {base!r} computes the whole step, and APFL needs the loss of two models; give a "
                "SplitStepStrategy, or none"
            )
        super().setup(context)

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        if _KEY not in context.client.state:
            raise ConfigError(f"{self!r}: give the trainer an APFLUpdateStrategy, too, which keeps v and α")
        optimizers = context.optimizers
        if context.run.needs_closure:
            raise ConfigError(f"{self!r}: an optimizer that evaluates the loss itself (LBFGS) supports one model only")
        states = self._states() if context.run.id and context.run.id == self._run_id else []
        kept = context.client.state[_KEY] = map_tensors(
            lambda it: it.detach().to(context.device, copy=True), context.client.state[_KEY]
        )
        parameters = model_parameters(context)
        self._own = {name: kept["v"][name].detach().requires_grad_(it.requires_grad) for name, it in parameters.items()}
        twins = {parameter: self._own[name] for name, parameter in parameters.items()}
        self._twins = [twin_of(optimizer, twins) for optimizer in optimizers]
        for twin, state in zip(self._twins, states, strict=False):
            twin.load_state_dict(state)
        self._alpha = kept["alpha"].detach().requires_grad_()
        self._alpha_optimizer = SGD([self._alpha])
        self._run_id, self._loaded = context.run.id, None

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of w, with the gradients of both losses."""
        sent = super().loss(model, optimizer, examples, labels, loss_criterion, context)
        with context.run.detached():
            mixture = self._mixture(model, context)
            own = super().loss(mixture, optimizer, examples, labels, loss_criterion, context)
        # The second term is 0, but its gradient is not.
        return sent + (own - own.detach())

    def differentiate(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Tensor,
        context: TrainingContext,
        options: Options,
    ) -> None:
        """Differentiate both losses at once, and step w, v and, in the first update, α."""
        super().differentiate(model, optimizer, loss, context, options)
        if not context.run.batch.optimized:
            context.backward(loss)
        stepped = context.run.batch.stepped
        context.step(*(it for it in context.optimizers if it not in stepped), *self._following(context))
        with torch.no_grad():
            self._alpha.clamp_(0, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what an interrupted run needs to resume; v and α are in the client's state."""
        own = {"run_id": self._run_id, "twins": self._states()} if self._run_id else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "run_id" in state:
            self._run_id, self._loaded = state["run_id"], list(state["twins"])

    def _states(self) -> list[Any]:
        return [twin.state_dict() for twin in self._twins] if self._loaded is None else self._loaded

    def _adapts(self, context: TrainingContext) -> bool:
        """Return whether the current update trains α."""
        return bool(context.state[_ADAPTS]) and context.progress.updates == 0

    def _following(self, context: TrainingContext) -> list[Optimizer]:
        """Return the optimizers of v, and of α if it is trained, with the current settings of the optimizers of w."""
        for optimizer, twin in zip(context.optimizers, self._twins, strict=True):
            for group, own in zip(optimizer.param_groups, twin.param_groups, strict=True):
                own.update({name: value for name, value in group.items() if name != "params"})
        if not self._adapts(context):
            return self._twins
        assert self._alpha_optimizer is not None
        self._alpha_optimizer.param_groups[0]["lr"] = context.optimizers[0].param_groups[0]["lr"]
        return [*self._twins, self._alpha_optimizer]

    def _mixture(self, model: nn.Module, context: TrainingContext) -> nn.Module:
        alpha = self._alpha if self._adapts(context) else self._alpha.detach()
        buffers = {name: it for name, it in context.client.state[_KEY]["v"].items() if name not in self._own}
        if self.mix == "outputs":
            return _OutputMixture(model, {**self._own, **buffers}, alpha, context)
        sent = {name: value.detach() for name, value in model_parameters(context).items()}
        return WithWeights(model, {**context.client.each(_mixed, self._own, sent, alpha), **buffers})


@dataclass(eq=False, repr=False)
class APFL(StrategyAlgorithm):
    """FedAvg whose clients use α v + (1 − α) w, with a personal v and α (Deng et al., 2020).

    Args:
        alpha: The initial α, from 0 to 1.
        adaptive_alpha: Train α by one gradient step in every round.
        mix: `"parameters"`, as in the paper, or `"outputs"`.

    Example:
        >>> APFL(alpha=0.75)
        APFL(alpha=0.75)
    """

    alpha: float = 0.5
    adaptive_alpha: bool = True
    mix: Literal["parameters", "outputs"] = "parameters"

    decides = ("the client's own model", "how a batch is computed")
    client_strategies: ClassVar = {"model_update": APFLUpdateStrategy, "training_step": APFLStepStrategy}


class _OutputMixture(WithWeights):
    """Mixes the outputs of v with the outputs of w."""

    def __init__(self, model: nn.Module, weights: Weights, alpha: Tensor, context: TrainingContext) -> None:
        super().__init__(model, weights)
        self._alpha, self._context = alpha, context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = super().forward(*args, **kwargs)
        (model,) = self._model
        with torch.no_grad():
            # Copies of the buffers: w has seen this batch, and its statistics must not count it twice.
            sent = functional_call(model, {name: it.clone() for name, it in model.named_buffers()}, args, kwargs)
        return self._context.client.each(_mixed_tensor, own, sent, self._alpha)


def _mixed(own: Weights, sent: Weights, alpha: Tensor) -> dict[str, Tensor]:
    return {name: _mixed_tensor(value, sent[name], alpha) for name, value in own.items()}


def _mixed_tensor(own: Tensor, sent: Tensor, alpha: Tensor) -> Tensor:
    alpha = alpha.to(own.dtype)
    return alpha * own + (1 - alpha) * sent
