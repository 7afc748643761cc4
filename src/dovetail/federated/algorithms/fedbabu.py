"""FedBABU: rounds train the body under a fixed head, which clients fine-tune at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dovetail.errors import UnknownNameError
from dovetail.federated.algorithms.layers import LayerNames
from dovetail.federated.algorithms.partial import (
    LayersFromConfig,
    Part,
    PartialAlgorithm,
    PartialUpdateStrategy,
    PersonalCopy,
)
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.nesting import Described

_FINETUNES = ("head", "all")


@dataclass(eq=False, repr=False)
class FedBABUUpdateStrategy(Described, PersonalCopy, PartialUpdateStrategy):
    """Trains the body in every round, and the layers to fine-tune after the last one.

    A client keeps its fine-tuned layers until it takes part in a round again.

    Args:
        global_layer_names: Patterns of the body.
        local_layer_names: Patterns of the head.
        finetune: `"head"`, as in the paper, or `"all"` layers.

    Example:
        >>> FedBABUUpdateStrategy(local_layer_names="head", finetune="all")
        FedBABUUpdateStrategy(local_layer_names='head', finetune='all')
    """

    global_layer_names: LayerNames = ()
    local_layer_names: LayerNames = ()
    finetune: Literal["head", "all"] = "head"

    def __post_init__(self) -> None:
        _check(self.finetune)

    def still(self, context: TrainingContext) -> Part | None:
        if not personalizes(context):
            return "local"
        return "global" if self.finetune == "head" else None


@dataclass(eq=False, repr=False)
class FedBABUUpdateStrategyFromConfig(LayersFromConfig, FedBABUUpdateStrategy):
    """FedBABU's strategy with its arguments from the configuration, under `algorithm`.

    Example:
        >>> FedBABUUpdateStrategyFromConfig()
        FedBABUUpdateStrategyFromConfig()
    """

    def on_train_start(self, context: TrainingContext) -> None:
        self.finetune = context.config.get("algorithm", {}).get("finetune", self.finetune)
        _check(self.finetune)
        super().on_train_start(context)


@dataclass(eq=False, repr=False)
class FedBABU(PartialAlgorithm):
    """FedAvg of the body under the initial head; clients fine-tune at the end (Oh et al., 2022).

    The head is part of the global model, and the same for all until the personalization round. The other arguments
    are the attributes of `PartialAlgorithm`: the layers that stay are the head.

    Args:
        finetune: The layers that the personalization round trains: the `"head"`, as in the paper, or `"all"`.

    Example:
        >>> FedBABU(finetune="all")
        FedBABU(finetune='all')
    """

    local_layer_names: LayerNames = None
    global_layer_names: LayerNames = None
    num_local_layers: int = 1
    finetune: Literal["head", "all"] = "head"

    client_strategies: ClassVar = {"model_update": FedBABUUpdateStrategy}

    def is_local(self, name: str) -> bool:
        """Return False: the head is not trained in rounds, so it is sent like all other layers."""
        return False


def _check(finetune: str) -> None:
    if finetune not in _FINETUNES:
        raise UnknownNameError("finetune", finetune, _FINETUNES)
