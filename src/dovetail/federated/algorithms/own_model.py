"""Personal model of a client, which is never sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.own_phase import model_state
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.modules import as_module
from dovetail.trainers.randomness import rng_state, set_rng_state

ModelFunction = Callable[[], nn.Module]


def first_own_model(context: TrainingContext, model_fn: ModelFunction | None = None) -> dict[str, Tensor]:
    """Return the initial parameters and buffers of a client's personal model, by name.

    Args:
        context: The context of a client that has not trained yet.
        model_fn: Builds a model with the shapes of the global one. None means a copy of the global model.

    Raises:
        ConfigError: The new model has other shapes.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> sorted(first_own_model(TrainingContext(nn.Linear(2, 1))))
        ['bias', 'weight']
    """
    sent = model_state(context)
    if model_fn is None:
        return sent
    # Restore the generators: building this model must not change the training of the global one.
    randomness = rng_state()
    try:
        made = as_module(model_fn)
    finally:
        set_rng_state(randomness)
    assert made is not None
    own = {name: value.detach().clone() for name, value in made.state_dict().items()}
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in sent.items()}:
        raise ConfigError(f"model_fn: expected a model with {_shapes(sent)}, got one with {_shapes(own)}")
    return {name: own[name].to(value) for name, value in sent.items()}


class WithWeights(nn.Module):
    """A model called with other weights. It has no parameters itself.

    Args:
        model: The model. Only its buffers that `weights` does not name are changed, in training.
        weights: Parameters and buffers, by name; those that are not named are the model's. They may have a gradient.

    Example:
        >>> import torch
        >>> WithWeights(nn.Linear(1, 1), {"weight": torch.ones(1, 1), "bias": torch.ones(1)})(torch.ones(1, 1))
        tensor([[2.]])
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        # In a tuple, so that the model does not become a submodule.
        self._model, self._weights = (model,), dict(weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return functional_call(self._model[0], self._weights, args, kwargs)


def _shapes(state: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in state.items())
