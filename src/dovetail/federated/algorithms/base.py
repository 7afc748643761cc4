"""A federated algorithm: the client's half is strategies, the server's half is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Fault, Update, Weights
from dovetail.overrides import reject_lost_overrides

if TYPE_CHECKING:
    from dovetail.trainers.strategies.base import Strategy
    from dovetail.trainers.strategies.bundle import Strategies

__all__ = ["Algorithm"]

_AGGREGATE = "override aggregate(weights, updates, average), which returns the new weights"
# What plato's algorithms define and nothing here calls.
_INSTEAD = {
    "aggregate_weights": _AGGREGATE,
    "aggregate_deltas": _AGGREGATE,
    "compute_weight_deltas": "the delta of an update is the difference; " + _AGGREGATE,
    "update_weights": _AGGREGATE,
    "extract_weights": "override stays(name) for layers that are not sent, and payload(client_id) for what else is",
    "load_weights": "override equip(strategies) for what a client does with the weights that it gets",
}


class Algorithm:
    """What clients do besides training, and what a server makes of their updates. This one is FedAvg.

    Override what differs. An algorithm's client half works on `context.client.state`, which belongs to the client,
    and on `context.client.payload`, which the server sent; its server half keeps what it needs on itself.

    Attributes:
        decides: What at most one of several algorithms can decide, such as which layers stay with clients; one that
            decides the same is refused beside it.
        needs_each_update: Whether the server's half makes more of updates than what `average` returns: a sum of masked
            updates is of no use to it, and noise in the mean does not protect what else it has seen.
        num_clients: How many clients there are; known from `begin` on.

    Example:
        >>> import torch
        >>> updates = [Update(k, 1, n, delta={"w": torch.tensor(v)}) for k, n, v in [(1, 1, 4.0), (2, 3, 8.0)]]
        >>> from dovetail.federated.averaging import weighted_mean
        >>> Algorithm().aggregate({"w": torch.tensor(1.0)}, updates, weighted_mean)
        {'w': tensor(8.)}
    """

    decides: tuple[str, ...] = ()
    needs_each_update: bool = False
    num_clients: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)

    @property
    def title(self) -> str:
        """What it is called in checkpoints and messages."""
        return type(self).__name__

    def begin(self, model: nn.Module, num_clients: int) -> None:
        """Look at what will be trained, before the first round; called by the server, and by every client.

        Args:
            model: As it is before the first round. Nothing may be changed.
            num_clients: How many clients there are, whether they are asked or not.
        """
        self.num_clients = num_clients

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        """Return the strategies that take the place of a client trainer's own, by role; they may wrap those."""
        return {}

    def stays(self, name: str) -> bool:
        """Whether an entry of the model's state stays with each client, and is never sent."""
        return False

    def payload(self, client_id: int) -> Mapping[str, Any]:
        """Return what a client gets besides the weights; tensors are not copied, so never change them in place."""
        return {}

    def check(self, update: Update) -> Fault | None:
        """Return why what a client has sent besides its weights is of no use, or None if nothing is wrong with it.

        Args:
            update: Of a client with samples, whose weights are in order; `update.sent` are those that it was sent.
        """
        return None

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        """Return the new global weights.

        Args:
            weights: The present ones.
            updates: Of this round, in the order in which their clients were asked; at least one.
            average: Makes one difference of many: the mean by samples, or whatever robust form the server uses.
        """
        return moved(weights, average(updates))

    def state_dict(self) -> dict[str, Any]:
        """Return what the server's half keeps from round to round: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
