"""SCAFFOLD: control variates correct the drift of local steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.errors import expect
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.algorithms.own_phase import OwnPhaseStrategy
from dovetail.federated.algorithms.penalty import sent_parameters
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Fault, Update, Weights
from dovetail.federated.personalization import personalizes
from dovetail.federated.validation import check_sent
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.anchored import Anchored, copy_tensors
from dovetail.trainers.strategies.base import ModelUpdateStrategy, Strategy
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.trainers.strategies.model_update import combine_update_strategies
from dovetail.trainers.strategies.nesting import Described

_KEY = "scaffold"
_DELTA = "control_variate_delta"


@dataclass(eq=False, repr=False)
class SCAFFOLDUpdateStrategy(Anchored, Described, ModelUpdateStrategy):
    """Changes every gradient g to g − c_i + c before the optimizer steps; the new c_i is option II of the paper.

    c_i ← c_i − c + (x − y) / Σ η_k, where x and y are the weights at the start and the end of the run, and η_k is the
    learning rate of its k-th real step. This is the mean gradient of the run for plain SGD, and an estimate with
    momentum or an optimizer that scales. The client keeps c_i and sends its change as `control_variate_delta`. The
    server sends c with the weights.

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> strategy = SCAFFOLDUpdateStrategy()
        >>> trainer = ComposableTrainer(torch.nn.Linear(2, 2), model_update_strategy=strategy, verbose=False)
        >>> _ = trainer.fit((torch.randn(8, 2), torch.zeros(8, dtype=torch.long)))
        >>> sorted(trainer.context.client.state["scaffold"])
        ['bias', 'weight']
    """

    vectorizes = True

    # Σ η_k of the current run.
    _travelled: Any = field(default=0.0, init=False)
    _delta: dict[str, Tensor] = field(default_factory=dict, init=False)
    # The parameters of every optimizer with their corrections; collected once per run.
    _corrected: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict, init=False)

    def on_prepare(self, context: TrainingContext) -> None:
        """Initialize c_i with 0 before a client's first run."""
        if _KEY not in context.client.state:
            context.client.state[_KEY] = _zeros(sent_parameters(context))

    def capture(self, context: TrainingContext) -> dict[str, Any]:
        self._travelled, self._delta = 0.0, {}
        own = context.client.state[_KEY]
        server = context.client.payload.get(_KEY) or _zeros(own)
        server = {name: value.to(own[name].device) for name, value in server.items()}
        return {
            "start": copy_tensors(sent_parameters(context)),
            "server": server,
            "correction": {name: server[name] - value for name, value in own.items()},
        }

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        self._corrected = {}

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        if context.run.is_detached or personalizes(context):
            return
        if id(optimizer) not in self._corrected:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._corrected[id(optimizer)] = [
                (parameter, self.anchor["correction"][name])
                for name, parameter in sent_parameters(context).items()
                if id(parameter) in stepped
            ]
        pairs = [(it.grad, change) for it, change in self._corrected[id(optimizer)] if it.grad is not None]
        if pairs:
            # One call for all tensors: one call per parameter costs more than the additions of a small model.
            torch._foreach_add_([gradient for gradient, _ in pairs], [change for _, change in pairs])

    def after_step(self, context: TrainingContext) -> None:
        if not context.run.is_detached:
            self._travelled = self._travelled + context.optimizers[0].param_groups[0]["lr"] * context.client.working

    def on_train_end(self, context: TrainingContext) -> None:
        """Compute the new c_i and the change to send; the personalization round keeps c_i."""
        if personalizes(context):
            return
        before = context.client.state[_KEY]
        after = self.renewed(context, before)
        self._delta = {name: value - before[name] for name, value in after.items()}
        context.client.state[_KEY] = after

    def renewed(self, context: TrainingContext, control: Weights) -> dict[str, Tensor]:
        """Return the new c_i."""
        now = {name: value.detach() for name, value in sent_parameters(context).items()}
        travelled = torch.as_tensor(self._travelled, dtype=torch.float64)
        return context.client.each(_option_two, control, self.anchor["server"], self.anchor["start"], now, travelled)

    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        return {_DELTA: self._delta}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "travelled": self._travelled} if self._run_id else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._travelled = state.get("travelled", 0.0)


@dataclass(eq=False, repr=False)
class SCAFFOLDUpdateStrategyV2(OwnPhaseStrategy, SCAFFOLDUpdateStrategy):
    """SCAFFOLD with option I: the new c_i is the gradient of all data of the client at the received weights.

    It is computed in one more epoch at the end of every round, in which no step is made.

    Example:
        >>> SCAFFOLDUpdateStrategyV2()
        SCAFFOLDUpdateStrategyV2()
    """

    phase_name = "gradient at the beginning"

    def capture(self, context: TrainingContext) -> dict[str, Any]:
        return SCAFFOLDUpdateStrategy.capture(self, context) | OwnPhaseStrategy.capture(self, context)

    def own_epochs(self, context: TrainingContext) -> int:
        return 0 if personalizes(context) else 1

    def own_start(self, context: TrainingContext) -> Weights:
        start: Weights = self.anchor["start"]
        self.anchor |= {"gradient": _zeros(start), "items": 0}
        return start

    def own_end(self, context: TrainingContext) -> None:
        """Do nothing: `on_gradients` has the sum of the gradients."""

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Correct the gradients of the model that is sent; in the additional epoch, sum them and make no step."""
        super().on_gradients(optimizer, context)
        if not context.run.is_detached:
            return
        items = torch.as_tensor(context.run.window.items if context.run.window.size > 1 else context.run.num_items)
        total = self.anchor["gradient"]
        for name, parameter in sent_parameters(context).items():
            if parameter.grad is not None:
                total[name] = total[name] + context.client.each(torch.mul, parameter.grad, items)
                # Without gradients, the optimizer makes no step in this epoch.
                parameter.grad = None
        self.anchor["items"] = self.anchor["items"] + items

    def renewed(self, context: TrainingContext, control: Weights) -> dict[str, Tensor]:
        return context.client.each(_divided, self.anchor["gradient"], self.anchor["items"])


@dataclass(eq=False, repr=False)
class SCAFFOLD(Described, Algorithm):
    """Local steps with g − c_i + c, and a server that keeps c (Karimireddy et al., 2020).

    x ← x + η_g · mean of Δy, with equal weights; c ← c + (1/N) Σ Δc_i, where N is the number of all clients.

    Args:
        option: 2 for the paper's option II, which is cheap; 1 for option I, the gradient at the received weights,
            which takes one more pass over the data and is more stable.
        server_learning_rate: η_g.

    Example:
        >>> SCAFFOLD(server_learning_rate=0.5)
        SCAFFOLD(server_learning_rate=0.5)
    """

    option: int = 2
    server_learning_rate: float = 1.0
    control: dict[str, Tensor] = field(default_factory=dict, init=False)
    _trained: frozenset[str] = field(default=frozenset(), init=False)

    decides = ("the drift of clients", "where a client's steps start")
    needs_each_update = True
    saved = ("control",)

    def __post_init__(self) -> None:
        expect(self.option in (1, 2), "option", "1 or 2", self.option)
        expect(self.server_learning_rate > 0, "server_learning_rate", "a number above 0", self.server_learning_rate)

    def prepare(self, model: nn.Module, num_clients: int) -> None:
        super().prepare(model, num_clients)
        self._trained = frozenset(name for name, _ in model.named_parameters())

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        kind = SCAFFOLDUpdateStrategyV2 if self.option == 1 else SCAFFOLDUpdateStrategy
        return {"model_update": combine_update_strategies(kind(), strategies.model_update)}

    def payload(self, client_id: int) -> Mapping[str, Any]:
        return {_KEY: self.control}

    def check(self, update: Update) -> Fault | None:
        """Reject a change that is not finite or has other shapes: it would stay in the gradients of all clients."""
        expected = {name: value for name, value in update.sent.items() if name in self._trained}
        return check_sent(update, update.payload.get(_DELTA), expected, _DELTA)

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        control = dict(self.control)
        for update in updates:
            for name, change in update.payload[_DELTA].items():
                # c ← c + (1/N) Σ Δc_i, where N is the number of all clients, not of the round's clients.
                share = change / self.num_clients
                control[name] = control[name] + share if name in control else share
        self.control = control
        # Equal weights, as in the paper.
        alike = [replace(update, num_samples=1) for update in updates]
        return moved(weights, average(alike), self.server_learning_rate)


def _zeros(weights: Weights) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value, requires_grad=False) for name, value in weights.items()}


def _option_two(
    control: Weights, server: Weights, start: Weights, now: Weights, travelled: Tensor
) -> dict[str, Tensor]:
    # Without a step, because a scaler skipped them all, c_i stays.
    has_moved = travelled > 0
    rate = torch.where(has_moved, travelled, 1.0)
    return {
        name: torch.where(has_moved, value - server[name] + (start[name] - now[name]) / rate.to(value.dtype), value)
        for name, value in control.items()
    }


def _divided(total: Weights, items: Tensor) -> dict[str, Tensor]:
    return {name: value / items.to(value.dtype) for name, value in total.items()}
