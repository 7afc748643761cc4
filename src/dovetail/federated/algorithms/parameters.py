"""Which entries of a model's state are trained, and which are only counted along."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.messages import Weights

__all__ = ["ParameterAware"]


class ParameterAware(Algorithm):
    """An algorithm whose server treats parameters otherwise than buffers, such as the statistics of BatchNorm.

    Which entries are parameters is known from `begin` on; before, all floating ones are taken for parameters.

    Example:
        >>> algorithm = ParameterAware()
        >>> algorithm.begin(nn.BatchNorm1d(2), num_clients=3)
        >>> sorted(algorithm.parameters_of(nn.BatchNorm1d(2).state_dict()))
        ['bias', 'weight']
    """

    _parameters: frozenset[str] | None = None

    def begin(self, model: nn.Module, num_clients: int) -> None:
        """Look at the model's parameters; one that is shared has several names."""
        super().begin(model, num_clients)
        self._parameters = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))

    def parameters_of(self, weights: Weights) -> dict[str, Tensor]:
        """Return the floating parameters among some entries, in at least 32 bits."""
        known = self._parameters
        return {
            name: value.to(torch.promote_types(value.dtype, torch.float32))
            for name, value in weights.items()
            if value.is_floating_point() and (known is None or name in known)
        }
