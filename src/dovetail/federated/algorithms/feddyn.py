"""FedDyn: dynamic regularization moves the minimum of every client to the global one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.errors import expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.parameters import ParameterAware
from dovetail.federated.algorithms.penalty import PenalizedLossStrategy, sent_parameters
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, Weights
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.anchored import Anchored, copy_tensors
from dovetail.trainers.strategies.base import ModelUpdateStrategy
from dovetail.trainers.strategies.nesting import Described

# The keys of λ_k in the state of a client, and of the relative size of a client in the server's payload.
_KEY = "feddyn"
_SIZE = "relative_size"


@dataclass(eq=False, repr=False)
class FedDynLossStrategy(PenalizedLossStrategy):
    """The loss of the task plus α⟨θ, λ_k⟩ + α/2 ‖θ − θᵗ‖², whose gradient is α (λ_k + θ − θᵗ).

    θᵗ is the model at the start of the run, and λ_k the sum of the client's differences so far, which
    `FedDynUpdateStrategy` updates; without that strategy λ_k stays 0. It has the arguments of `FedDyn`, and
    `base_loss_fn`. Outside of a federation, `adaptive_alpha` has no effect.

    Example:
        >>> FedDynLossStrategy(alpha=0.1)
        FedDynLossStrategy(alpha=0.1)
    """

    alpha: float = 0.01
    adaptive_alpha: bool = False

    def __post_init__(self) -> None:
        _check(self.alpha)
        super().__post_init__()

    def capture(self, context: TrainingContext) -> dict[str, Any]:
        told = context.client.payload.get(_KEY, {}) if self.adaptive_alpha else {}
        return _beginning(context) | {name: value.to(context.device) for name, value in told.items()}

    def penalty(self, weights: Weights, anchor: Any) -> Tensor:
        start, pull = anchor["start"], anchor["pull"]
        # ⟨θ, λ_k⟩ + 1/2 ‖θ − θᵗ‖², one term per tensor; α is a common factor.
        terms = [
            (value * pull[name]).sum() + (value - start[name]).square().sum() / 2 for name, value in weights.items()
        ]
        penalty: Tensor = self.alpha * sum(terms[1:], start=terms[0])
        if _SIZE in anchor:
            # `adaptive_alpha`: a client with more samples than the mean has a smaller α.
            penalty = penalty / anchor[_SIZE].to(penalty.dtype)
        return penalty


@dataclass(eq=False, repr=False)
class FedDynLossStrategyFromConfig(FedDynLossStrategy):
    """FedDyn's loss with `feddyn_alpha` or `alpha_coef` of the configuration, under `algorithm`.

    Example:
        >>> FedDynLossStrategyFromConfig()
        FedDynLossStrategyFromConfig()
    """

    def on_train_start(self, context: TrainingContext) -> None:
        told = context.config.get("algorithm", {})
        self.alpha = float(told.get("feddyn_alpha", told.get("alpha_coef", self.alpha)))
        _check(self.alpha)
        super().on_train_start(context)


@dataclass(eq=False, repr=False)
class FedDynUpdateStrategy(Anchored, Described, ModelUpdateStrategy):
    """Updates λ_k ← λ_k + θ_k − θᵗ at the end of a run; it is stored as `context.client.state["feddyn"]`.

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> trainer = ComposableTrainer(
        ...     torch.nn.Linear(2, 2),
        ...     loss_strategy=FedDynLossStrategy(alpha=0.1),
        ...     model_update_strategy=FedDynUpdateStrategy(),
        ...     verbose=False,
        ... )
        >>> _ = trainer.fit((torch.randn(8, 2), torch.zeros(8, dtype=torch.long)))
        >>> sorted(trainer.context.client.state["feddyn"])
        ['bias', 'weight']
    """

    vectorizes = True

    def on_prepare(self, context: TrainingContext) -> None:
        """Initialize λ_k with 0 before a client's first run."""
        if _KEY not in context.client.state:
            context.client.state[_KEY] = _zeros(context)

    def capture(self, context: TrainingContext) -> dict[str, Any]:
        return _beginning(context)

    def on_train_end(self, context: TrainingContext) -> None:
        """Compute λ_k from its value at the start of the run, so that a resumed run counts once."""
        if personalizes(context):
            # The server receives no update of this run, and its h must stay the mean of all λ_k.
            return
        start, pull = self.anchor["start"], self.anchor["pull"]
        context.client.state[_KEY] = {
            name: pull[name] + value.detach() - start[name] for name, value in sent_parameters(context).items()
        }


@dataclass(eq=False, repr=False)
class FedDyn(StrategyAlgorithm, ParameterAware):
    """Clients minimise F_k(θ) + α⟨θ, λ_k⟩ + α/2 ‖θ − θᵗ‖², and the server keeps h (Acar et al., 2021).

    h ← h − (α/N) Σ (θ_k − θᵗ), with N of all clients; θ ← mean of θ_k − h/α, every client of the round counting the
    same. Buffers, such as the statistics of BatchNorm, are averaged as they are.

    It converges to the minimum of the mean of all F_k; with `adaptive_alpha`, of their mean by samples.

    Args:
        alpha: α, above 0.
        adaptive_alpha: Use α / (N n_k / n) for a client with n_k samples, where N clients have n samples. The server
            counts the clients that have reported; a client that has not reported has α.

    Example:
        >>> FedDyn(alpha=0.1)
        FedDyn(alpha=0.1)
    """

    alpha: float = 0.01
    adaptive_alpha: bool = False
    h: dict[str, Tensor] = field(default_factory=dict, init=False)
    # The samples of every client that has reported, by its id.
    samples: dict[str, int] = field(default_factory=dict, init=False)

    decides = ("the drift of clients",)
    # A sum of masked updates is weighted by samples, and does not contain the number of updates.
    needs_each_update = True
    saved = ("h", "samples")
    client_strategies: ClassVar = {"loss": FedDynLossStrategy, "model_update": FedDynUpdateStrategy}

    def payload(self, client_id: int) -> Mapping[str, Any]:
        if not self.adaptive_alpha:
            return {}
        known = self.samples.get(str(client_id))
        mean = sum(self.samples.values()) / max(len(self.samples), 1)
        size = 1.0 if known is None else known / mean
        return {_KEY: {_SIZE: torch.tensor(size, dtype=torch.float64)}}

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        if self.adaptive_alpha:
            self.samples = self.samples | {str(update.client_id): update.num_samples for update in updates}
        # Called once, because a postprocessor adds and counts its noise at every call.
        mean = dict(average([replace(update, num_samples=1) for update in updates]))
        # h ← h − (α/N) Σ (θ_k − θᵗ): `moves` has the mean over the round's clients, so their number is multiplied
        # back.
        share = self.alpha * len(updates) / self.num_clients
        moves = self.parameters_of(mean)
        self.h = self.h | {name: self.h.get(name, 0.0) - share * move for name, move in moves.items()}
        return moved(weights, mean | {name: move - self.h[name] / self.alpha for name, move in moves.items()})


def _check(alpha: float) -> None:
    expect(alpha > 0, "alpha", "a number above 0", alpha)


def _beginning(context: TrainingContext) -> dict[str, Any]:
    return {"start": copy_tensors(sent_parameters(context)), "pull": context.client.state.get(_KEY) or _zeros(context)}


def _zeros(context: TrainingContext) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value, requires_grad=False) for name, value in sent_parameters(context).items()}
