"""FedAvg, and a personalisation round at its end that trains the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.algorithms.partial import PersonalCopy
from dovetail.trainers.strategies.base import Strategy
from dovetail.trainers.strategies.model_update import beside
from dovetail.trainers.strategies.nesting import Described

if TYPE_CHECKING:
    from dovetail.trainers.strategies.bundle import Strategies

__all__ = ["FedAvgFinetune", "FinetuneUpdateStrategy"]


@dataclass(eq=False, repr=False)
class FinetuneUpdateStrategy(Described, PersonalCopy):
    """Keeps the model that a client's personalisation round has made, until the client takes part in a round again.

    Example:
        >>> FinetuneUpdateStrategy()
        FinetuneUpdateStrategy()
    """


@dataclass(eq=False, repr=False)
class FedAvgFinetune(Described, Algorithm):
    """FedAvg whose clients fine-tune the global model for themselves, and use what came of it.

    Example:
        >>> FedAvgFinetune()
        FedAvgFinetune()
    """

    decides = ("the client's own model",)

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        """Let clients keep what they fine-tune."""
        return {"model_update": beside(FinetuneUpdateStrategy(), strategies.model_update)}
