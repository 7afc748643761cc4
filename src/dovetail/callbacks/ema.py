"""Averages of the weights: their base class, and the exponential moving average."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.callbacks.base import Callback, is_new_run
from dovetail.distributed import own_part, part_of
from dovetail.errors import ConfigError
from dovetail.units import check_count, counted

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class WeightAverage(Callback):
    """Base class of callbacks that average the trainable parameters.

    Buffers and frozen parameters are copied from the model. The average of half-precision weights is stored in float32.
    The callback does not change training.

    Attributes:
        num_averaged: How many weights the average contains.
    """

    def __init__(self) -> None:
        self.num_averaged = 0
        self._model: nn.Module | None = None
        self._averages: dict[str, Tensor] = {}
        # The same tensors as lists, in the same order, for a fast update.
        self._parameters: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._is_mixed = False
        self._training_weights: list[Tensor] | None = None
        self._is_loaded = False

    def average_state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state with the average in place of the trainable parameters."""
        if self._model is None:
            raise ConfigError(f"{type(self).__name__}: there is no average yet: it starts with the training")
        by_parameter = dict(zip(map(id, self._parameters), self._targets, strict=True))
        state = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in self._model.state_dict().items()
        }
        # Including duplicates, because tied weights have several names.
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if id(parameter) in by_parameter and name in state:
                state[name] = by_parameter[id(parameter)].to(parameter.dtype, copy=True)
        return state

    def apply_to(self, model: nn.Module) -> None:
        """Copy the average and the current buffers to a model: the trained one or another of the same form."""
        model.load_state_dict(self.average_state_dict())

    def bind(self, model: nn.Module) -> None:
        """Use the average that `load_state_dict` has restored with a model, after it was trained in other processes."""
        if self._averages:
            self._model, self._is_loaded = model, False
            self._bind(model)

    def on_train_start(self, context: TrainingContext) -> None:
        """Start the average of a new run; a resumed one continues."""
        assert context.model is not None
        # Start again for another model or a new run, unless a checkpoint has just restored the average.
        if not self._is_loaded and (context.model is not self._model or is_new_run(context)):
            self._averages, self.num_averaged = {}, 0
        self._model, self._is_loaded = context.model, False
        self._bind(context.model)

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Start the average of parameters that were unfrozen since the last epoch."""
        assert context.model is not None
        self._bind(context.model)

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self._restore_training_weights()

    def _blend(self, weight: float) -> None:
        """Move the average by a part of the way to the current weights."""
        self.num_averaged += 1
        parameters = self._parameters
        with torch.no_grad():
            if self._is_mixed:
                # `lerp` needs equal dtypes, and averages of half precision are stored in float32.
                parameters = [
                    parameter.to(target.dtype) for parameter, target in zip(parameters, self._targets, strict=True)
                ]
            # average + weight · (parameter - average), in a few kernels for all tensors.
            torch._foreach_lerp_(_own(self._targets), _own(parameters), weight)

    def _show_average(self) -> None:
        """Put the average in the model until `_restore_training_weights`."""
        # In place: optimizers and other callbacks refer to the parameters.
        self._training_weights = [parameter.detach().clone() for parameter in self._parameters]
        with torch.no_grad():
            torch._foreach_copy_(_own(self._parameters), _own(self._targets))

    def _restore_training_weights(self) -> None:
        if self._training_weights is not None:
            with torch.no_grad():
                torch._foreach_copy_(_own(self._parameters), _own(self._training_weights))
            self._training_weights = None

    def _bind(self, model: nn.Module) -> None:
        """Start the averages of new parameters, and collect the tensors that `on_update` averages."""
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in trainable.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            known = self._averages.get(name)
            if known is None:
                self._averages[name] = parameter.detach().to(dtype, copy=True)
            elif known.shape != parameter.shape:
                raise ConfigError(
                    f"{type(self).__name__}: the average of {name!r} has the shape {tuple(known.shape)}, "
                    f"the parameter {tuple(parameter.shape)}: it is of another model"
                )
            else:
                self._averages[name] = part_of(known.to(parameter.device, dtype), parameter)
        # A parameter that was frozen again is not averaged, but its average is kept here.
        self._parameters = list(trainable.values())
        self._targets = [self._averages[name] for name in trainable]
        self._is_mixed = any(
            parameter.dtype != target.dtype for parameter, target in zip(self._parameters, self._targets, strict=True)
        )

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self._averages), "num_averaged": self.num_averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages = {name: average.detach().clone() for name, average in state["averages"].items()}
        self.num_averaged = int(state["num_averaged"])
        self._is_loaded = True


class EMA(WeightAverage):
    """Maintain an exponential moving average of the trainable parameters.

    After every update, `average = decay · average + (1 - decay) · parameter`, starting with the weights at the start of
    training. Buffers and frozen parameters are copied from the model. The average of half-precision weights is stored
    in float32. The callback does not change training.

    Args:
        decay: The weight of the previous average.
        every: Update the average only at every n-th optimizer update.
        warmup: Whether the decay rises as `(1 + n) / (10 + n)` over the first n averages until it reaches `decay`, so
            that the random initial weights have less influence.
        validate_with_average: Whether to validate the average instead of the training weights during `fit`.

    Example:
        >>> import torch
        >>> from dovetail.trainers.context import TrainingContext
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> ema, context = EMA(decay=0.75), TrainingContext(model)
        >>> _ = torch.nn.init.constant_(model.weight, 0.0)
        >>> ema.on_train_start(context)
        >>> _ = torch.nn.init.constant_(model.weight, 1.0)
        >>> ema.on_update(context)
        >>> ema.average_state_dict()
        {'weight': tensor([[0.2500]])}
    """

    def __init__(
        self, decay: float = 0.999, every: int = 1, warmup: bool = False, validate_with_average: bool = True
    ) -> None:
        super().__init__()
        if not 0 <= decay <= 1:
            raise ConfigError(f"EMA: decay: expected a number from 0 to 1, got {decay!r}")
        check_count("EMA: every", every)
        self.decay = decay
        self.every = every
        self.warmup = warmup
        self.validate_with_average = validate_with_average
        self.validated_weights = "EMA" if validate_with_average else ""
        self._updates_before = 0

    def on_train_start(self, context: TrainingContext) -> None:
        self._updates_before = context.progress.updates
        super().on_train_start(context)

    def on_update(self, context: TrainingContext) -> None:
        if self.every > 1 and context.progress.updates % self.every:
            return
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_averaged) / (10 + self.num_averaged))
        self._blend(1 - decay)

    def on_validation_start(self, context: TrainingContext) -> None:
        if self.validate_with_average:
            self._show_average()

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self._restore_training_weights()

    def on_train_end(self, context: TrainingContext) -> None:
        num_updates = context.progress.updates - self._updates_before
        if self.num_averaged == 0 and num_updates > 0 and context.run.stop_reason is None:
            warnings.warn(
                f"EMA: the average is still the initial weights: every is {self.every}, "
                f"and the run made {counted(num_updates, 'update')}",
                UserWarning,
                stacklevel=2,
            )


def _own(tensors: list[Tensor]) -> list[Tensor]:
    # If several processes hold parts of the model, each process averages its part.
    return [own_part(tensor) for tensor in tensors]
