"""Base classes of federated algorithms: strategies for the clients, and aggregation for the server."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor, nn

from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Fault, Update, Weights
from dovetail.overrides import reject_lost_overrides
from dovetail.trainers.strategies.base import Strategy
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.trainers.strategies.model_update import combine_update_strategies
from dovetail.trainers.strategies.nesting import Described

_AGGREGATE = "override aggregate(weights, updates, average), which returns the new weights"
# Methods of plato's algorithms that are never called here, each with its replacement.
_PLATO = "; or derive from dovetail.compat.plato.algorithms.fedavg.Algorithm, for plato's servers and clients there"
_INSTEAD = {
    "aggregate_weights": _AGGREGATE + _PLATO,
    "aggregate_deltas": _AGGREGATE,
    "compute_weight_deltas": "the delta of an update is the difference; " + _AGGREGATE + _PLATO,
    "update_weights": _AGGREGATE + _PLATO,
    "extract_weights": "override is_local(name) for layers that are not sent, and payload(client_id) to send more"
    + _PLATO,
    "load_weights": "override equip(strategies), which returns the client's strategies" + _PLATO,
    # Earlier names of methods of this class.
    "begin": "override prepare(model, num_clients)",
    "stays": "override is_local(name)",
}


class Algorithm:
    """The strategies that clients add to their trainer, and the aggregation of their updates. This class is FedAvg.

    Override what differs. The strategies of a client use `context.client.state`, which belongs to the client, and
    `context.client.payload`, which the server sent. The server's state is stored in attributes of the algorithm.

    Attributes:
        decides: Topics that at most one of several combined algorithms can decide, such as which layers stay with
            clients. Two algorithms that decide the same topic are rejected.
        needs_each_update: True if `aggregate` uses more than the result of `average`. Such an algorithm cannot use
            masked updates, of which the server sees only the sum, nor noise that protects only the mean.
        saved: The attributes that `state_dict` returns.
        num_clients: The number of clients; set by `prepare`.

    Example:
        >>> import torch
        >>> updates = [Update(k, 1, n, delta={"w": torch.tensor(v)}) for k, n, v in [(1, 1, 4.0), (2, 3, 8.0)]]
        >>> from dovetail.federated.averaging import weighted_mean
        >>> Algorithm().aggregate({"w": torch.tensor(1.0)}, updates, weighted_mean)
        {'w': tensor(8.)}
    """

    decides: tuple[str, ...] = ()
    needs_each_update: bool = False
    saved: ClassVar[tuple[str, ...]] = ()
    num_clients: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)

    @property
    def title(self) -> str:
        """The name in checkpoints and messages."""
        return type(self).__name__

    def prepare(self, model: nn.Module, num_clients: int) -> None:
        """Read the model before the first round; called by the server and by every client.

        Args:
            model: The initial model, which must not be changed.
            num_clients: The number of all clients, selected or not.
        """
        self.num_clients = num_clients

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        """Return the strategies, by role, that replace the ones of a client's trainer; they may wrap them."""
        return {}

    def is_local(self, name: str) -> bool:
        """Return whether an entry of the model's state stays with each client and is never sent."""
        return False

    def payload(self, client_id: int) -> Mapping[str, Any]:
        """Return what a client receives besides the weights; tensors are not copied, so never change them in place."""
        return {}

    def check(self, update: Update) -> Fault | None:
        """Return why the payload of an update is invalid. None means that it is valid.

        Args:
            update: The update of a client with samples, whose weights are valid; `update.sent` are the weights that
                the client received.
        """
        return None

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        """Return the new global weights.

        Args:
            weights: The current global weights.
            updates: The updates of this round, in the order in which their clients were selected; at least one.
            average: Turns many differences into one: the mean by samples, or the server's robust aggregator.
        """
        return moved(weights, average(updates))

    def state_dict(self) -> dict[str, Any]:
        """Return the server's state between two rounds: tensors and plain values."""
        return {name: copy.copy(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        for name in self.saved:
            setattr(self, name, copy.copy(state[name]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class StrategyAlgorithm(Described, Algorithm):
    """A dataclass of arguments that it passes to the strategies of its clients.

    Each strategy receives the arguments of the algorithm that it has itself, and wraps the strategy of the client's
    trainer. The strategies are also built once with the algorithm, so that invalid arguments raise at once.

    Attributes:
        client_strategies: The classes of the strategies, by role.
    """

    client_strategies: ClassVar[Mapping[str, type[Any]]] = {}

    def __post_init__(self) -> None:
        for kind in self.client_strategies.values():
            self._build(kind)

    def strategy_arguments(self) -> dict[str, Any]:
        """Return the arguments of the algorithm, by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}  # type: ignore[arg-type]

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        present = {role: getattr(strategies, role) for role in self.client_strategies}
        if "optimizer" not in strategies.given:
            # The options of a trainer describe another kind of optimizer, so nothing of it is kept inside.
            present = {role: None if role == "optimizer" else strategy for role, strategy in present.items()}
        return {role: self._wrap(role, strategy) for role, strategy in present.items()}

    def _wrap(self, role: str, present: Any) -> Any:
        kind = self.client_strategies[role]
        if role == "model_update":
            return combine_update_strategies(self._build(kind), present)
        return self._build(kind, **{"base_loss_fn" if role == "loss" else "base_strategy": present})

    def _build(self, kind: type[Any], **inside: Any) -> Any:
        accepted = {each.name for each in fields(kind) if each.init}
        given = {name: value for name, value in self.strategy_arguments().items() if name in accepted}
        return kind(**given, **inside)
