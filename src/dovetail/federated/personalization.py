"""Personal models of clients: the weights that a client uses itself, and the rounds that train only these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from dovetail.trainers.context import TrainingContext
from dovetail.trainers.preserve_state import with_parts
from dovetail.trainers.strategies.base import Strategy


@runtime_checkable
class Personalizing(Protocol):
    """An update strategy whose clients use other weights than they send."""

    def personal_weights(self, context: TrainingContext) -> Mapping[str, Tensor] | None:
        """Return the weights that the client itself uses, by name; None means the weights of the model."""


def personal_weights(strategy: Strategy | None, context: TrainingContext) -> Mapping[str, Tensor] | None:
    """Return the weights that the client itself uses; None means the weights of the model.

    Args:
        strategy: The update strategy. If it holds several, the first one that returns weights decides.
        context: The context of the client's trainer.

    Example:
        >>> from dovetail.trainers.strategies import CompositeUpdateStrategy, ModelUpdateStrategy, NoOpUpdateStrategy
        >>> class Keeps(ModelUpdateStrategy):
        ...     def personal_weights(self, context):
        ...         return context.client.state["own"]
        >>> context = TrainingContext()
        >>> context.client.state["own"] = {"weight": 1.0}
        >>> personal_weights(CompositeUpdateStrategy([NoOpUpdateStrategy(), Keeps()]), context)
        {'weight': 1.0}
    """
    candidates = [] if strategy is None else with_parts([strategy])
    found = (it.personal_weights(context) for it in candidates if isinstance(it, Personalizing))
    return next((weights for weights in found if weights is not None), None)


def personalizes(context: TrainingContext) -> bool:
    """Return whether the running round comes after all rounds: clients train for themselves, and nothing is sent.

    Example:
        >>> context = TrainingContext()
        >>> context.config["rounds"], context.client.round = 3, 4
        >>> personalizes(context)
        True
    """
    # The server counts the personalization as one more round than `rounds` of the settings.
    return context.client.round > float(context.config.get("rounds", math.inf))
