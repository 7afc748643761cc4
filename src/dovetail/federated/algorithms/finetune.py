"""FedAvg with fine-tuning: a personalization round at the end trains the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.partial import PersonalCopy
from dovetail.trainers.strategies.nesting import Described


@dataclass(eq=False, repr=False)
class FinetuneUpdateStrategy(Described, PersonalCopy):
    """Stores the model of a client's personalization round until the client takes part in a round again.

    Example:
        >>> FinetuneUpdateStrategy()
        FinetuneUpdateStrategy()
    """


@dataclass(eq=False, repr=False)
class FedAvgFinetune(StrategyAlgorithm):
    """FedAvg whose clients fine-tune the global model and use the result.

    Example:
        >>> FedAvgFinetune()
        FedAvgFinetune()
    """

    decides = ("the client's own model",)
    client_strategies: ClassVar = {"model_update": FinetuneUpdateStrategy}
