"""FedRep: every round trains first the client's own head, then the shared body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dovetail.errors import ConfigError, expect
from dovetail.federated.algorithms.layers import LayerNames
from dovetail.federated.algorithms.partial import LayersFromConfig, Part, PartialAlgorithm, PartialUpdateStrategy
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import Phase, TrainingContext
from dovetail.trainers.strategies.nesting import Described

_HEAD, _BODY = "head", "body"


@dataclass(eq=False, repr=False)
class FedRepUpdateStrategy(Described, PartialUpdateStrategy):
    """Trains the head in the first epochs of a run, and the body in the others; after the last round, the head alone.

    A round must have epochs for both. Outside of a federation, `fit` may have epochs for the head only.

    Args:
        global_layer_names: Patterns of the body.
        local_layer_names: Patterns of the head.
        local_epochs: The number of epochs that train the head.

    Example:
        >>> strategy = FedRepUpdateStrategy(["body"], ["head"], local_epochs=4)
        >>> from dovetail.trainers.context import TrainingContext
        >>> [(phase.name, phase.epochs) for phase in strategy.phases(5, TrainingContext())]
        [('head', 4), ('body', 1)]
    """

    global_layer_names: LayerNames = ()
    local_layer_names: LayerNames = ()
    local_epochs: int = 1

    def __post_init__(self) -> None:
        _check(self.local_epochs)

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the epochs of the head and of the body.

        Raises:
            ConfigError: A round has no epoch left for the body, so that nothing of what is sent would be trained.
        """
        if personalizes(context):
            return (_head(epochs),)
        if context.current_round and self.local_epochs >= epochs:
            raise ConfigError(
                f"local_epochs: expected fewer than the epochs of a round, {epochs}, got {self.local_epochs}: the body "
                "would never be trained"
            )
        own = min(self.local_epochs, epochs)
        return _head(own), Phase(epochs - own, _BODY)

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        context.run.is_detached = context.run.phase_at(context.progress.epoch).is_detached

    def on_train_end(self, context: TrainingContext) -> None:
        context.run.is_detached = False
        super().on_train_end(context)

    def still(self, context: TrainingContext) -> Part:
        return "global" if context.run.phase_at(context.progress.epoch).name == _HEAD else "local"


@dataclass(eq=False, repr=False)
class FedRepUpdateStrategyFromConfig(LayersFromConfig, FedRepUpdateStrategy):
    """FedRep's strategy with its arguments from the configuration, under `algorithm`.

    Example:
        >>> FedRepUpdateStrategyFromConfig()
        FedRepUpdateStrategyFromConfig()
    """

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the epochs of the head, whose number is in the configuration, and of the body."""
        self.local_epochs = context.config.get("algorithm", {}).get("local_epochs", self.local_epochs)
        _check(self.local_epochs)
        return super().phases(epochs, context)


@dataclass(eq=False, repr=False)
class FedRep(PartialAlgorithm):
    """FedAvg of the body; the head stays with its client, and is trained before it (Collins et al., 2021).

    The other arguments are the attributes of `PartialAlgorithm`.

    Args:
        local_epochs: The number of epochs of a round that train the head; the others train the body.

    Example:
        >>> FedRep(local_epochs=4)
        FedRep(local_epochs=4)
    """

    local_layer_names: LayerNames = None
    global_layer_names: LayerNames = None
    local_epochs: int = 1
    num_local_layers: int = 1

    client_strategies: ClassVar = {"model_update": FedRepUpdateStrategy}


def _head(epochs: int) -> Phase:
    # Personal, because nothing of what is sent is trained: penalties and step counts apply to the body only.
    return Phase(epochs, _HEAD, is_detached=True)


def _check(local_epochs: int) -> None:
    expect(local_epochs >= 1, "local_epochs", "a whole number that is at least 1", local_epochs)
