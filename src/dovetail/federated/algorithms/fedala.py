"""FedALA: each client learns, element by element, how much of the global model it takes over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.data import num_batches
from dovetail.errors import ConfigError, expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.own_phase import load_in_place, model_state, optimizers_of, restore_optimizers
from dovetail.federated.messages import Weights
from dovetail.trainers.context import Phase, TrainingContext
from dovetail.trainers.strategies.anchored import Anchored, model_parameters
from dovetail.trainers.strategies.base import ModelUpdateStrategy
from dovetail.trainers.strategies.nesting import Described

_KEY = "fedala"
# Epochs of a client's first adaptation, if it does not settle before.
_FIRST_EPOCHS = 20


@dataclass(eq=False, repr=False)
class FedALAUpdateStrategy(Anchored, Described, ModelUpdateStrategy):
    """Before training, the model becomes θ̂ = θ_l + (θ_g − θ_l) ⊙ W, between the client's last model and the new one.

    W is learned in the first epochs of the run, in which nothing else changes: W ← W − η ∇θ̂ ⊙ (θ_g − θ_l), clamped
    to 0…1. The first adaptation of a client ends when the loss settles, after 20 epochs at most; later ones have one
    epoch per round. In its first round a client has no last model and trains as without FedALA. Optimizers and
    schedules are reset after the adaptation.

    It has the arguments of `FedALA`.

    Example:
        >>> FedALAUpdateStrategy(layer_idx=2)
        FedALAUpdateStrategy(layer_idx=2)
    """

    eta: float = 1.0
    rand_percent: float = 80
    layer_idx: int = 0
    threshold: float = 0.1
    num_pre_loss: int = 10

    def __post_init__(self) -> None:
        expect(self.eta > 0, "eta", "a number above 0", self.eta)
        expect(0 < self.rand_percent <= 100, "rand_percent", "a number above 0 and up to 100", self.rand_percent)
        for name, least in (("layer_idx", 0), ("threshold", 0), ("num_pre_loss", 1)):
            expect(getattr(self, name) >= least, name, f"a number that is at least {least}", getattr(self, name))

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the epochs of W, if there is something to adapt, and the epochs of the model."""
        return Phase(self._adaptation(context), "adapt", is_detached=True), Phase(epochs)

    def capture(self, context: TrainingContext) -> dict[str, Any]:
        known = context.client.state.get(_KEY)
        adapted = self._adapted(context)
        return {
            "received": model_state(context),
            "mix": {name: torch.ones_like(it) for name, it in adapted.items()} if known is None else dict(known["mix"]),
            "losses": [],
            "adaptation": _adaptation_of(context),
            **optimizers_of(context),
        }

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        context.run.is_detached = context.run.phase_at(context.progress.epoch).is_detached

    def on_phase_start(self, phase: Phase, context: TrainingContext) -> None:
        """Start the adaptation, or the training of the adapted model."""
        if phase.is_detached:
            load_in_place(
                context, self._between(context.client.state[_KEY]["local"], self.anchor["received"], self.anchor["mix"])
            )
        elif self.anchor["adaptation"]:
            parameters = model_parameters(context)
            # Batch norm has counted the batches of the adaptation, so its statistics are restored.
            load_in_place(context, {name: it for name, it in self.anchor["received"].items() if name not in parameters})
            restore_optimizers(context, self.anchor)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Update W instead of the model in the adaptation."""
        if not context.run.is_detached:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        local, received, mix = context.client.state[_KEY]["local"], self.anchor["received"], self.anchor["mix"]
        counts = self._counts(context)
        for name, parameter in model_parameters(context).items():
            if id(parameter) not in stepped or parameter.grad is None:
                continue
            if counts and name in mix:
                # Otherwise an overflow in half precision would leave NaN in W.
                slope = parameter.grad.nan_to_num(0.0, 0.0, 0.0) * (received[name] - local[name])
                mix[name] = (mix[name] - self.eta * slope).clamp(0, 1)
            # Without gradients, the optimizer changes no parameter in the adaptation.
            parameter.grad = None
        load_in_place(context, self._between(local, received, mix))

    def on_epoch_end(self, context: TrainingContext) -> None:
        """End the adaptation when the loss has settled."""
        if not context.run.is_detached:
            return
        losses = self.anchor["losses"]
        losses.append(context.history.get_latest_metric("train_loss"))
        if len(losses) > self.num_pre_loss and pstdev(losses[-self.num_pre_loss :]) < self.threshold:
            # The loop continues with the first epoch of the next phase.
            context.progress.epoch = self.anchor["adaptation"]

    def on_train_end(self, context: TrainingContext) -> None:
        super().on_train_end(context)
        context.run.is_detached = False
        context.client.state[_KEY] = {
            "local": model_state(context),
            "mix": dict(self.anchor["mix"]),
            "has_adapted": torch.tensor(self.anchor["adaptation"] > 0),
        }

    def personal_weights(self, context: TrainingContext) -> Mapping[str, Tensor] | None:
        """Return the weights with which the client would start the next round, given its present W."""
        known = context.client.state.get(_KEY)
        if known is None:
            return None
        now = model_state(context)
        return {**now, **self._between(known["local"], now, known["mix"])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if isinstance(self.anchor, Mapping):
            self.anchor = {**self.anchor, "mix": dict(self.anchor["mix"]), "losses": list(self.anchor["losses"])}

    def _adaptation(self, context: TrainingContext) -> int:
        """Return the epochs of W in the planned run."""
        if context.progress.batches and context.run.id == self._run_id:
            # A resumed run keeps its plan, although the client has a model by now.
            return int(self.anchor["adaptation"])
        known = context.client.state.get(_KEY)
        return 0 if known is None else 1 if known["has_adapted"] else _FIRST_EPOCHS

    def _adapted(self, context: TrainingContext) -> dict[str, Tensor]:
        """Return the parameters that are adapted."""
        every = model_parameters(context)
        if self.layer_idx > len(every):
            raise ConfigError(
                f"layer_idx: expected at most the {len(every)} parameters of the model, got {self.layer_idx}"
            )
        # A layer_idx of 0 selects all, because a slice from -0 is a slice from the start.
        return {name: every[name].detach() for name in list(every)[-self.layer_idx :]}

    def _counts(self, context: TrainingContext) -> bool:
        """Return whether the current update changes W."""
        total, size = num_batches(context.state["train_loader"]), context.run.window.size
        return total is None or context.progress.batch // size * 100 < self.rand_percent * math.ceil(total / size)

    def _between(self, local: Weights, received: Weights, mix: Weights) -> dict[str, Tensor]:
        return {name: local[name] + (received[name] - local[name]) * it for name, it in mix.items()}


@dataclass(eq=False, repr=False)
class FedALA(StrategyAlgorithm):
    """FedAvg whose clients start between their last model and the new one, as suits their data (Zhang et al., 2023).

    Args:
        eta: η, the learning rate of W.
        rand_percent: The percentage of an epoch's updates that change W, the first ones.
        layer_idx: The number of last parameters that are adapted; 0 for all. The others are copied from the new model.
        threshold: A client's first adaptation ends if the standard deviation of its last losses is below this.
        num_pre_loss: The number of these losses, each the mean of an epoch.

    Example:
        >>> FedALA(eta=0.5)
        FedALA(eta=0.5)
    """

    eta: float = 1.0
    rand_percent: float = 80
    layer_idx: int = 0
    threshold: float = 0.1
    num_pre_loss: int = 10

    decides = ("the client's own model", "where a client's steps start")
    client_strategies: ClassVar = {"model_update": FedALAUpdateStrategy}


def _adaptation_of(context: TrainingContext) -> int:
    """Return the epochs of W in the current run."""
    first = context.run.phases[0]
    return first.epochs if first.is_detached else 0
