"""Base classes of algorithms that divide a model into shared layers and layers that stay with a client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from dovetail.callbacks import Callback
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.layers import LayerNames, as_patterns, local_names
from dovetail.federated.algorithms.own_phase import model_state
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.anchored import model_parameters
from dovetail.trainers.strategies.base import ModelUpdateStrategy, Phase, Strategy

Part = Literal["local", "global"]

_KEY = "personal"


class DividedModel(Strategy):
    """A strategy for shared and local layers. Without names, the last layer is local.

    Attributes:
        global_layer_names: Patterns of the shared layers. Empty means all layers that are not local.
        local_layer_names: Patterns of the layers that stay with a client. Empty means all layers that are not shared.
    """

    global_layer_names: LayerNames = ()
    local_layer_names: LayerNames = ()

    def local(self, context: TrainingContext) -> frozenset[str]:
        """Return the names of the entries that stay with a client."""
        assert context.model is not None
        return local_names(context.model, as_patterns(self.local_layer_names), as_patterns(self.global_layer_names))


class LayersFromConfig(DividedModel):
    """Reads `global_layer_names` and `local_layer_names` under `algorithm` of the configuration of a run."""

    def on_train_start(self, context: TrainingContext) -> None:
        told = context.config.get("algorithm", {})
        self.global_layer_names = told.get("global_layer_names", self.global_layer_names)
        self.local_layer_names = told.get("local_layer_names", self.local_layer_names)
        super().on_train_start(context)


class PartialUpdateStrategy(DividedModel, ModelUpdateStrategy, ABC):
    """Trains one part of the model at a time.

    The parameters of the other part require no gradient meanwhile, so that neither momentum nor weight decay changes
    them. They require it again after the run, also after an error. Buffers are updated in both parts.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> class HeadOnly(PartialUpdateStrategy):
        ...     def still(self, context):
        ...         return "global"
        >>> context = TrainingContext(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        >>> HeadOnly().on_train_start(context)
        >>> [name for name, parameter in context.model.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
    """

    vectorizes = True

    _local: frozenset[str] = frozenset()
    _still: tuple[Tensor, ...] = ()
    _watch: Callback | None = None

    @abstractmethod
    def still(self, context: TrainingContext) -> Part | None:
        """Return which layers are not trained in the running phase; None if all are."""

    def setup(self, context: TrainingContext) -> None:
        """Add a callback for errors: the optimizer of the next run is created before `on_train_start`."""
        super().setup(context)
        self._watch = _AfterErrors(self)
        context.callbacks.add(self._watch)

    def teardown(self, context: TrainingContext) -> None:
        self.thaw()
        if self._watch is not None:
            context.callbacks.remove(self._watch)
        super().teardown(context)

    def on_train_start(self, context: TrainingContext) -> None:
        super().on_train_start(context)
        self._local = self.local(context)
        self.freeze(context)

    def on_phase_start(self, phase: Phase, context: TrainingContext) -> None:
        self.freeze(context)

    def on_train_end(self, context: TrainingContext) -> None:
        self.thaw()
        super().on_train_end(context)

    def freeze(self, context: TrainingContext) -> None:
        """Freeze the layers that the running phase does not train, and no others."""
        self.thaw()
        part = self.still(context)
        if part is None:
            return
        self._still = tuple(
            parameter
            for name, parameter in model_parameters(context).items()
            if (name in self._local) == (part == "local") and parameter.requires_grad
        )
        for parameter in self._still:
            parameter.requires_grad_(False)

    def thaw(self) -> None:
        """Make the frozen layers trainable again."""
        for parameter in self._still:
            parameter.requires_grad_(True)
        self._still = ()


class PersonalCopy(ModelUpdateStrategy):
    """Stores the model of a client's personalization round until the client takes part in a round again."""

    vectorizes = True

    def on_train_end(self, context: TrainingContext) -> None:
        """Store the personalized weights, or delete them after a normal round."""
        if personalizes(context):
            # Before `super`, which makes the frozen layers trainable again; these equal the global model and need no
            # storage.
            frozen = {name for name, value in model_parameters(context).items() if not value.requires_grad}
            context.client.state[_KEY] = {
                name: value for name, value in model_state(context).items() if name not in frozen
            }
        else:
            context.client.state.pop(_KEY, None)
        super().on_train_end(context)

    def personal_weights(self, context: TrainingContext) -> Mapping[str, Tensor] | None:
        """Return what the client has trained for itself, if it has."""
        return context.client.state.get(_KEY)


class PartialAlgorithm(StrategyAlgorithm):
    """An algorithm whose clients keep some layers, which are never sent.

    Attributes:
        local_layer_names: Patterns of the layers that stay with clients.
        global_layer_names: Patterns of the layers that are sent. If only one of both is given, all other layers are of
            the other kind.
        num_local_layers: Without patterns, the number of last layers that stay.

    Example:
        >>> from dovetail.federated.algorithms.fedper import FedPer
        >>> algorithm = FedPer()
        >>> algorithm.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_clients=4)
        >>> algorithm.is_local("0.weight"), algorithm.is_local("1.weight")
        (False, True)
    """

    decides: tuple[str, ...] = ("which layers stay with clients",)

    local_layer_names: LayerNames
    global_layer_names: LayerNames
    num_local_layers: int

    _local: frozenset[str] = frozenset()
    _global: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.num_local_layers >= 1:
            raise ConfigError(
                f"num_local_layers: expected a whole number that is at least 1, got {self.num_local_layers!r}"
            )
        super().__post_init__()

    def strategy_arguments(self) -> dict[str, Any]:
        # The exact names, so that client and server divide the model in the same way.
        return {**super().strategy_arguments(), "global_layer_names": self._global, "local_layer_names": ()}

    def prepare(self, model: nn.Module, num_clients: int) -> None:
        """Find the layers.

        Raises:
            ConfigError: The model has no such layers.
        """
        super().prepare(model, num_clients)
        patterns = as_patterns(self.local_layer_names), as_patterns(self.global_layer_names)
        self._local = local_names(model, *patterns, self.num_local_layers)
        self._global = tuple(name for name in model.state_dict() if name not in self._local)

    def is_local(self, name: str) -> bool:
        return name in self._local


class _AfterErrors(Callback):
    """Makes layers trainable again after an error."""

    def __init__(self, strategy: PartialUpdateStrategy) -> None:
        self._strategy = strategy

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self._strategy.thaw()
