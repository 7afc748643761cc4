"""FedPer: every client has its own head on a shared body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dovetail.federated.algorithms.layers import LayerNames
from dovetail.federated.algorithms.partial import LayersFromConfig, Part, PartialAlgorithm, PartialUpdateStrategy
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.nesting import Described


@dataclass(eq=False, repr=False)
class FedPerUpdateStrategy(Described, PartialUpdateStrategy):
    """Trains all layers; after the last round, the client's own alone.

    `global_layer_names` are patterns of the shared layers. None means all except the last layer.

    Example:
        >>> FedPerUpdateStrategy(global_layer_names=["body"])
        FedPerUpdateStrategy(global_layer_names=['body'])
    """

    global_layer_names: LayerNames = ()

    def still(self, context: TrainingContext) -> Part | None:
        return "global" if personalizes(context) else None


@dataclass(eq=False, repr=False)
class FedPerUpdateStrategyFromConfig(LayersFromConfig, FedPerUpdateStrategy):
    """FedPer's strategy with `global_layer_names` or `local_layer_names` of the configuration, under `algorithm`.

    Example:
        >>> FedPerUpdateStrategyFromConfig()
        FedPerUpdateStrategyFromConfig()
    """


@dataclass(eq=False, repr=False)
class FedPer(PartialAlgorithm):
    """FedAvg of the body; the head stays with its client and is trained with it (Arivazhagan et al., 2019).

    The arguments are the attributes of `PartialAlgorithm`.

    Example:
        >>> FedPer(local_layer_names="head")
        FedPer(local_layer_names='head')
    """

    local_layer_names: LayerNames = None
    global_layer_names: LayerNames = None
    num_local_layers: int = 1

    client_strategies: ClassVar = {"model_update": FedPerUpdateStrategy}
