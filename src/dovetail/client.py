"""Federated client that a trainer works for: its identity, state and payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.func import vmap

__all__ = ["ClientContext"]

_R = TypeVar("_R")


@dataclass(slots=True)
class ClientContext:
    """The client of a federation that a trainer trains for.

    A trainer outside of a federation has one with default values, so that strategies of federated algorithms also work
    there.

    Attributes:
        id: The number of the client; 0 for a server and outside of a federation.
        round: The federated round; 0 outside of a federation.
        state: State of the client that is kept between rounds; each strategy has its own key.
        payload: Values that the server sent in addition to the weights, by name.
        local_names: Names in the model's state that are never sent to the server.
        is_fleet: True if the model is a fleet: every tensor has one row per client.
        working: 1; in a fleet, 1 for every client that has a batch in the current step and 0 for the others.
    """

    id: int = 0
    round: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    payload: Mapping[str, Any] = field(default_factory=dict)
    local_names: frozenset[str] = frozenset()
    is_fleet: bool = False
    working: Any = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the part that checkpoints store: the state of the client."""
        # A federation sets the other fields again before every task.
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.state = dict(state)

    def each(self, function: Callable[..., _R], *rows: Any) -> _R:
        """Call a function of tensors and dictionaries of tensors; in a fleet, once per client with its rows.

        Example:
            >>> import torch
            >>> def length(weights):
            ...     return sum(value.square().sum() for value in weights.values()).sqrt()
            >>> client = ClientContext()
            >>> client.each(length, {"w": torch.tensor([3.0, 4.0])})
            tensor(5.)
            >>> client.is_fleet = True
            >>> client.each(length, {"w": torch.tensor([[3.0, 4.0], [6.0, 8.0]])})
            tensor([ 5., 10.])
        """
        return vmap(function)(*rows) if self.is_fleet else function(*rows)
