"""plato's algorithm: reads the weights of a trainer's model, writes them, and applies differences to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dovetail.federated.algorithms import FedAvg
from dovetail.federated.averaging import moved
from dovetail.federated.messages import Weights

__all__ = ["Algorithm"]


class Algorithm(FedAvg):
    """plato's algorithm of a server or a client; a subclass overrides any of its methods.

    `dovetail.compat.plato.servers.fedavg.Server` and `dovetail.compat.plato.clients.simple.Client` take the class and
    make the object with their trainer.

    Args:
        trainer: The trainer; its model has the weights.

    Example:
        >>> import torch
        >>> from dovetail.compat.plato import Trainer
        >>> algorithm = Algorithm(Trainer(torch.nn.Linear(1, 1), verbose=False))
        >>> algorithm.load_weights({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
        >>> algorithm.update_weights({"weight": torch.ones(1, 1), "bias": torch.ones(1)})
        {'weight': tensor([[2.]]), 'bias': tensor([1.])}
    """

    def __init__(self, trainer: Any = None) -> None:
        self.trainer = trainer
        # plato's constructor stores the model, too, and overrides read `self.model`.
        self.model: Any = None if trainer is None else trainer.model
        self.client_id = 0

    def set_client_id(self, client_id: int) -> None:
        """Set the client for which the algorithm works; 0 is the server."""
        self.client_id = client_id

    def extract_weights(self, model: nn.Module | None = None) -> Any:
        """Return the weights of the model, on the CPU."""
        chosen = self.model if model is None else model
        return {name: value.detach().cpu() for name, value in chosen.state_dict().items()}

    def load_weights(self, weights: Any) -> None:
        """Copy weights into the model; every entry is needed."""
        self.model.load_state_dict(weights, strict=True)

    def compute_weight_deltas(self, baseline_weights: Any, weights_received: Any) -> Sequence[Any]:
        """Return the differences of the received weights from the current ones, for each client."""
        return [
            {name: value - baseline_weights[name] for name, value in weights.items()} for weights in weights_received
        ]

    def update_weights(self, deltas: Weights) -> dict[str, Tensor]:
        """Return the current weights, moved by a difference."""
        return moved(self.extract_weights(), deltas)

    # A server checks whether this method is overridden; the result None of this one is never used.
    async def aggregate_weights(self, baseline_weights: Any, weights_received: Any, **kwargs: Any) -> Any:
        """Override to return new weights; only a server whose `aggregate_weights` calls it uses it."""
