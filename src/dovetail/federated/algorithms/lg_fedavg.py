"""LG-FedAvg: every batch trains the local layers, and then the shared layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.layers import LayerNames, last_layers, local_names
from dovetail.federated.algorithms.partial import DividedModel, LayersFromConfig, PartialAlgorithm
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.modules import forward
from dovetail.trainers.strategies.anchored import model_parameters
from dovetail.trainers.strategies.base import Strategy, TrainingStepStrategy
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.trainers.strategies.nesting import Described
from dovetail.trainers.strategies.training_step import DefaultTrainingStepStrategy, compose_steps


class TwoPassStepStrategy(DividedModel, TrainingStepStrategy):
    """Two passes over every batch; the second one uses the layers that the first one has updated.

    A pass differentiates by its own layers only, so that neither momentum nor weight decay changes the others. If
    several batches share an update, the second pass repeats all of them after the first update.
    """

    vectorizes = True

    train_local_first: bool = True
    _passes: Sequence[Sequence[Tensor]] = ()
    _window: Sequence[tuple[Any, Any, Any]] = ()

    def on_train_start(self, context: TrainingContext) -> None:
        """Find the layers; after the last round, only the local ones are trained."""
        super().on_train_start(context)
        local = self.local(context)
        own: list[Tensor] = []
        shared: list[Tensor] = []
        for name, parameter in model_parameters(context).items():
            if parameter.requires_grad:
                (own if name in local else shared).append(parameter)
        order = [own, shared] if self.train_local_first else [shared, own]
        self._passes = [it for it in order if it and (it is own or not personalizes(context))]
        if not self._passes:
            raise ConfigError(f"{self!r} cannot train: none of the chosen layers requires a gradient")

    def on_train_end(self, context: TrainingContext) -> None:
        self._passes, self._window = (), ()
        super().on_train_end(context)

    def training_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Callable[[Any, Any], Tensor],
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of the last pass; inside of a window, of the first pass."""
        batch = (examples, labels, context.run.num_items)
        # The batches of one accumulated update, which the second pass repeats.
        self._window = [batch] if context.run.window.opens else [*self._window, batch]
        first, *later = self._passes
        loss = loss_criterion(forward(model, examples), labels)
        # Gradients for these layers only: the optimizer skips parameters without a gradient.
        context.backward(loss, inputs=first)
        context.step(optimizer)
        if not context.run.window.closes:
            return loss.detach()
        for parameters in later:
            if context.precision is not None:
                # A scaler accepts one step of an optimizer per update, and no gradient is pending here.
                context.precision.update()
            for examples, labels, context.run.num_items in self._window:
                loss = loss_criterion(forward(model, examples), labels)
                context.backward(loss, inputs=parameters)
            context.step(optimizer)
        return loss.detach()


@dataclass(eq=False, repr=False)
class LGFedAvgStepStrategy(Described, TwoPassStepStrategy):
    """A step for the local layers, and one for the shared layers.

    Args:
        global_layer_names: Patterns of the shared layers.
        local_layer_names: Patterns of the local layers.
        train_local_first: Train the local layers first.

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> step = LGFedAvgStepStrategy(global_layer_names=["head"], local_layer_names=["body"])
        >>> ComposableTrainer(training_step_strategy=step, verbose=False).strategies.training_step
        LGFedAvgStepStrategy(global_layer_names=['head'], local_layer_names=['body'])
    """

    global_layer_names: LayerNames = ()
    local_layer_names: LayerNames = ()
    train_local_first: bool = True


@dataclass(eq=False, repr=False)
class LGFedAvgStepStrategyFromConfig(LayersFromConfig, LGFedAvgStepStrategy):
    """LG-FedAvg's step with `global_layer_names` and `local_layer_names` of the configuration, under `algorithm`.

    Example:
        >>> LGFedAvgStepStrategyFromConfig()
        LGFedAvgStepStrategyFromConfig()
    """


@dataclass(eq=False, repr=False)
class LGFedAvgStepStrategyAuto(Described, TwoPassStepStrategy):
    """LG-FedAvg's step, whose local layers are the last ones.

    Args:
        num_local_layers: The number of last layers with parameters.
        train_local_first: Train the local layers first.

    Example:
        >>> LGFedAvgStepStrategyAuto(num_local_layers=2)
        LGFedAvgStepStrategyAuto(num_local_layers=2)
    """

    num_local_layers: int = 1
    train_local_first: bool = True

    def local(self, context: TrainingContext) -> frozenset[str]:
        assert context.model is not None
        return local_names(context.model, last_layers(context.model, self.num_local_layers))


@dataclass(eq=False, repr=False)
class LGFedAvg(PartialAlgorithm):
    """FedAvg of some layers, whose clients keep the others and train both in turn, batch by batch (Liang et al., 2020).

    In the paper, the layers that compute a representation stay. The other arguments are the attributes of
    `PartialAlgorithm`.

    Args:
        train_local_first: Train the layers that stay before those that are sent.

    Example:
        >>> LGFedAvg(local_layer_names=["body"])
        LGFedAvg(local_layer_names=['body'])
    """

    local_layer_names: LayerNames = None
    global_layer_names: LayerNames = None
    num_local_layers: int = 1
    train_local_first: bool = True

    decides = ("which layers stay with clients", "how a batch is computed")
    client_strategies: ClassVar = {"training_step": LGFedAvgStepStrategy}

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        own = self._build(LGFedAvgStepStrategy)
        present = strategies.training_step
        if type(present) is DefaultTrainingStepStrategy:
            return {"training_step": own}
        return {"training_step": compose_steps(present, own)}
