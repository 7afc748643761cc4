"""Base of algorithms that aggregate parameters and buffers differently."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.messages import Weights


class ParameterAware(Algorithm):
    """An algorithm whose server treats parameters differently from buffers, such as the statistics of BatchNorm.

    `prepare` reads which entries are parameters; before it, all floating entries count as parameters.

    Example:
        >>> algorithm = ParameterAware()
        >>> algorithm.prepare(nn.BatchNorm1d(2), num_clients=3)
        >>> sorted(algorithm.parameters_of(nn.BatchNorm1d(2).state_dict()))
        ['bias', 'weight']
    """

    _parameters: frozenset[str] | None = None

    def prepare(self, model: nn.Module, num_clients: int) -> None:
        """Store the names of the parameters; a shared parameter has several names."""
        super().prepare(model, num_clients)
        self._parameters = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))

    def parameters_of(self, weights: Weights) -> dict[str, Tensor]:
        """Return the floating parameters among some entries, in at least 32 bits."""
        known = self._parameters
        return {
            name: value.to(torch.promote_types(value.dtype, torch.float32))
            for name, value in weights.items()
            if value.is_floating_point() and (known is None or name in known)
        }
