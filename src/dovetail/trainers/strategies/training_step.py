"""Training-step strategies: how the loss of one batch is computed and differentiated.

A step has two halves, the loss and its backward pass. A strategy changes one of them, or a setting of the context, and
leaves the rest to the strategy inside it. The loop still controls accumulation, precision and clipping.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.clipping import Clipping
from dovetail.errors import ConfigError, DataError, NonFiniteLossError
from dovetail.trainers.modules import forward
from dovetail.trainers.precision import Precision, PrecisionName
from dovetail.trainers.strategies.base import Strategy, TrainingStepStrategy
from dovetail.trainers.strategies.nesting import Described, Nesting
from dovetail.units import check_count

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


Criterion = Callable[[Any, Any], Tensor]
Options = Mapping[str, bool]


class SplitStepStrategy(TrainingStepStrategy):
    """A step in two halves that outer strategies can call separately: the loss, and its backward pass."""

    @abstractmethod
    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch."""

    @abstractmethod
    def differentiate(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Tensor,
        context: TrainingContext,
        options: Options,
    ) -> None:
        """Call backward and step, or do nothing: the loop then does both.

        Args:
            model: The module that is trained.
            optimizer: The optimizer to step.
            loss: The result of `loss`.
            context: The context of the run.
            options: Arguments for `backward` that the outer strategies request.
        """

    def training_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch. The gradients are computed here only if a strategy customizes `differentiate`."""
        loss = self.loss(model, optimizer, examples, labels, loss_criterion, context)
        self.differentiate(model, optimizer, loss, context, {})
        return loss


@dataclass(eq=False, repr=False)
class DefaultTrainingStepStrategy(Described, SplitStepStrategy):
    """Forward pass and loss: the innermost step of all others.

    Args:
        create_graph: Build a graph of the gradients, for second derivatives. Also `config["create_graph"]`.
        retain_graph: Keep the graph of the loss. Also `config["retain_graph"]`.

    Example:
        >>> step = DefaultTrainingStepStrategy()
        >>> step.training_step(nn.Identity(), None, torch.ones(2), torch.zeros(2), nn.MSELoss(), context=None)
        tensor(1.)
    """

    vectorizes = True

    create_graph: bool = False
    retain_graph: bool = False

    def __post_init__(self) -> None:
        self._options = _enabled(create_graph=self.create_graph, retain_graph=self.retain_graph)

    def on_train_start(self, context: TrainingContext) -> None:
        """Read the configuration of the run."""
        self._options = _enabled(
            create_graph=self.create_graph or context.config.get("create_graph", False),
            retain_graph=self.retain_graph or context.config.get("retain_graph", False),
        )

    def training_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch."""
        # Most trainers use this step, so a batch of one tensor avoids the call of `forward`.
        outputs = model(examples) if isinstance(examples, Tensor) else forward(model, examples)
        loss = loss_criterion(outputs, labels)
        if self._options:
            self.differentiate(model, optimizer, loss, context, {})
        return loss

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch."""
        return loss_criterion(forward(model, examples), labels)

    def differentiate(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Tensor,
        context: TrainingContext,
        options: Options,
    ) -> None:
        """Call backward and step if `backward` needs arguments; otherwise leave both to the loop."""
        _differentiate(optimizer, loss, context, {**options, **self._options})


@dataclass(eq=False, repr=False)
class NestingStepStrategy(Nesting, SplitStepStrategy):
    """A step around another one. Override `loss`, `differentiate` or a hook; the defaults call the step inside.

    Args:
        base_strategy: The step inside; None means a forward pass and its loss.

    Example:
        >>> class DoubledLoss(NestingStepStrategy):
        ...     def loss(self, *step):
        ...         return 2 * super().loss(*step)
        >>> nested = DoubledLoss(base_strategy=MultipleForwardPassStepStrategy(3))
        >>> nested.training_step(nn.Identity(), None, torch.ones(1), None, lambda outputs, labels: outputs.sum(), None)
        tensor(2.)
    """

    base_strategy: TrainingStepStrategy | None = field(default=None, kw_only=True)
    backward_options: dict[str, bool] = field(default_factory=dict, init=False)

    @property
    def parts(self) -> Sequence[Strategy]:
        """The step inside, if there is one."""
        return () if self.base_strategy is None else (self.base_strategy,)

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch."""
        base = self.base_strategy
        if base is None:
            return loss_criterion(forward(model, examples), labels)
        compute = base.loss if isinstance(base, SplitStepStrategy) else base.training_step
        return compute(model, optimizer, examples, labels, loss_criterion, context)

    def differentiate(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Tensor,
        context: TrainingContext,
        options: Options,
    ) -> None:
        """Call `differentiate` of the step inside, with the `backward` arguments of this step."""
        options = {**options, **self.backward_options}
        if isinstance(self.base_strategy, SplitStepStrategy):
            self.base_strategy.differentiate(model, optimizer, loss, context, options)
        else:
            _differentiate(optimizer, loss, context, options)


@dataclass(eq=False, repr=False)
class GradientAccumulationStepStrategy(NestingStepStrategy):
    """Several batches share one update; its gradient equals the gradient of one large batch.

    The loop controls the window: it closes the last, shorter window of an epoch and divides by the real length. Hooks,
    schedules and counters count updates, not batches.

    Args:
        accumulation_steps: Batches in a full window.
        create_graph: Build a graph of the gradients, for second derivatives.
        base_strategy: The step inside; None means a plain one.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> context = TrainingContext()
        >>> GradientAccumulationStepStrategy(accumulation_steps=4).setup(context)
        >>> context.run.window.size
        4
    """

    accumulation_steps: int = 1
    create_graph: bool = False

    def __post_init__(self) -> None:
        check_count("accumulation_steps", self.accumulation_steps)
        self.backward_options = _enabled(create_graph=self.create_graph)

    def setup(self, context: TrainingContext) -> None:
        """Set the size of the window.

        Raises:
            ConfigError: The size is already set to another value.
        """
        window = context.run.window
        if window.size not in (1, self.accumulation_steps):
            raise ConfigError(
                f"accumulation_steps: {self!r} finds a window of {window.size} batches; accumulate in one place"
            )
        window.size = self.accumulation_steps
        super().setup(context)

    def teardown(self, context: TrainingContext) -> None:
        """Reset the size of the window."""
        context.run.window.size = 1
        super().teardown(context)


@dataclass(eq=False, repr=False)
class MixedPrecisionStepStrategy(NestingStepStrategy):
    """Forward and loss in lower precision for operations where this is safe; in float16 with a scaled loss.

    It sets the precision of the run. The loop computes under autocast. The trainer scales the loss, unscales before
    clipping, and neither makes nor counts a step whose gradients overflowed. Checkpoints include the scaler.

    Args:
        enabled: False means full precision, True lower precision, None lower precision except on a CPU.
        create_graph: Build a graph of the gradients, for second derivatives.
        precision: `bf16`, `fp16` or `fp32`; `auto` for the best of the device.
        base_strategy: The step inside; None means a plain one.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> context = TrainingContext()
        >>> step = MixedPrecisionStepStrategy(precision="bf16")
        >>> step.setup(context)
        >>> context.precision.dtype
        torch.bfloat16
    """

    enabled: bool | None = None
    create_graph: bool = False
    precision: PrecisionName = field(default="auto", kw_only=True)
    _precision: Precision | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.backward_options = _enabled(create_graph=self.create_graph)
        # Raises now if the name is unknown.
        Precision(self.precision)

    def setup(self, context: TrainingContext) -> None:
        """Set the precision of the context."""
        device_type = context.device.type
        name: PrecisionName = "fp32" if self.enabled is False else self.precision
        if self.enabled and name == "auto" and device_type == "cpu":
            name = "bf16"
        precision = Precision(name, device_type)
        self._precision = context.precision = None if precision.dtype is torch.float32 else precision
        super().setup(context)

    def teardown(self, context: TrainingContext) -> None:
        """Remove the precision from the context."""
        context.precision = None
        super().teardown(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler and of the step inside."""
        scaler = {} if self._precision is None else self._precision.state_dict()
        return super().state_dict() | ({"scaler": scaler} if scaler else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        super().load_state_dict(state)
        if self._precision is not None:
            self._precision.load_state_dict(state.get("scaler", {}))


@dataclass(eq=False, repr=False)
class GradientClippingStepStrategy(NestingStepStrategy):
    """A step with clipping of the gradient norm, after the gradients are complete and unscaled.

    Args:
        max_norm: The largest norm of an optimizer's gradients.
        norm_type: The order of the norm.
        base_strategy: The step inside; None means a plain one.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> weight = torch.zeros(2, requires_grad=True); weight.grad = torch.tensor([3.0, 4.0])
        >>> GradientClippingStepStrategy(max_norm=1.0).on_gradients(torch.optim.SGD([weight]), TrainingContext())
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """

    max_norm: float = 1.0
    norm_type: float = 2.0
    clipping: Clipping = field(init=False)

    def __post_init__(self) -> None:
        self.clipping = Clipping("GradientClippingStepStrategy", self.max_norm, norm_type=self.norm_type)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Clip the gradients of the optimizer."""
        super().on_gradients(optimizer, context)
        context.run.batch.gradient_norm = self.clipping.apply(optimizer)


@dataclass(eq=False, repr=False)
class CustomBackwardStepStrategy(NestingStepStrategy):
    """A step whose backward pass is a function.

    The function is called with the loss of every batch. It has two choices:

    * It calls `context.backward`, any number of times and with any loss. The optimizer steps afterwards, when the
      window closes. `loss.backward()` would bypass accumulation and scaling.
    * It never calls `context.backward`, and only adds terms to `.grad`. The loop then adds the gradients of the loss.

    At this point gradients are the sums of the window so far, times the scale of float16. To change complete gradients
    (clipping, noise), use `on_gradients`.

    Args:
        backward_hook: A function of the model, the loss and the context.
        base_strategy: The step inside; None means a plain one. Its `backward` arguments are not applied.

    Example:
        >>> def with_penalty(model, loss, context):
        ...     context.backward(loss, retain_graph=True)
        ...     context.backward(0.1 * loss.square())
        >>> CustomBackwardStepStrategy(with_penalty)
        CustomBackwardStepStrategy(backward_hook=with_penalty)
    """

    backward_hook: Callable[[nn.Module, Tensor, TrainingContext], object]

    def differentiate(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Tensor,
        context: TrainingContext,
        options: Options,
    ) -> None:
        """Call the function, and step if it called `context.backward`."""
        self.backward_hook(model, loss, context)
        if context.run.batch.optimized and optimizer not in context.run.batch.stepped:
            context.step(optimizer)


@dataclass(eq=False, repr=False)
class MultipleForwardPassStepStrategy(NestingStepStrategy):
    """Several forward passes over one batch, for a model (dropout) or a step with random numbers.

    Args:
        num_passes: The number of passes.
        aggregate_fn: Combines the list of losses into one; None means their mean.
        base_strategy: The step inside, which runs once per pass; None means a plain one.

    Example:
        >>> step = MultipleForwardPassStepStrategy(3, aggregate_fn=sum)
        >>> step.training_step(nn.Identity(), None, torch.ones(2), torch.zeros(2), nn.MSELoss(), context=None)
        tensor(3.)
    """

    num_passes: int = 2
    aggregate_fn: Callable[[list[Tensor]], Tensor] | None = None

    def __post_init__(self) -> None:
        check_count("num_passes", self.num_passes)

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the joint loss of all passes."""
        losses = [
            super(MultipleForwardPassStepStrategy, self).loss(
                model, optimizer, examples, labels, loss_criterion, context
            )
            for _ in range(self.num_passes)
        ]
        return torch.stack(losses).mean() if self.aggregate_fn is None else self.aggregate_fn(losses)


@dataclass(eq=False, repr=False)
class ValidateBeforeStepStrategy(NestingStepStrategy):
    """A step with checks for NaN and infinity, before these reach the parameters.

    Every check waits for the device. Under float16 gradients are not checked: the scaler handles an overflow.

    Args:
        check_inputs: Check examples and labels.
        check_outputs: Check the model's outputs and the loss.
        check_gradients: Check complete gradients, before the optimizer steps.
        raise_on_error: Raise instead of warning.
        base_strategy: The step to check; None means a plain one.

    Raises:
        DataError: An input is not finite.
        NonFiniteLossError: An output, the loss or a gradient is not finite.

    Example:
        >>> step = ValidateBeforeStepStrategy(raise_on_error=True)
        >>> step.training_step(nn.Identity(), None, torch.tensor([torch.nan]), None, None, context=None)
        Traceback (most recent call last):
        ...
        dovetail.errors.DataError: NaN or infinity in the examples of the batch
    """

    check_inputs: bool = True
    check_outputs: bool = True
    check_gradients: bool = True
    raise_on_error: bool = False

    def loss(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Any,
        labels: Any,
        loss_criterion: Criterion,
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch after the checks."""
        if self.check_inputs:
            self._check_finite(examples, "the examples of the batch", DataError)
            self._check_finite(labels, "the labels of the batch", DataError)
        if not self.check_outputs:
            return super().loss(model, optimizer, examples, labels, loss_criterion, context)

        def checked_criterion(outputs: Any, labels: Any) -> Tensor:
            self._check_finite(outputs, "the outputs of the model", NonFiniteLossError)
            loss = loss_criterion(outputs, labels)
            self._check_finite(loss, "the loss", NonFiniteLossError)
            return loss

        return super().loss(model, optimizer, examples, labels, checked_criterion, context)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Check the gradients of the optimizer, before a strategy inside changes them."""
        if self.check_gradients and (context.precision is None or context.precision.scaler is None):
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            self._check_finite(gradients, "the gradients", NonFiniteLossError)
        super().on_gradients(optimizer, context)

    def _check_finite(self, values: Any, what: str, error: type[Exception]) -> None:
        if all(tensor.isfinite().all() for tensor in _tensors(values)):
            return
        message = f"NaN or infinity in {what}"
        if self.raise_on_error:
            raise error(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def compose_steps(*strategies: TrainingStepStrategy) -> TrainingStepStrategy:
    """Return one step that nests several: each is put inside the one before it, so the first is the outermost.

    A step that cannot contain another, such as a user's step that computes everything itself, must be last. The default
    step becomes the innermost at any position.

    Raises:
        ConfigError: No step is given, one is given twice, or a step that cannot contain another is not last.

    Example:
        >>> compose_steps(GradientAccumulationStepStrategy(4), GradientClippingStepStrategy(max_norm=2.0))
        GradientAccumulationStepStrategy(accumulation_steps=4, base_strategy=GradientClippingStepStrategy(max_norm=2.0))
    """
    if not strategies:
        raise ConfigError("compose_steps: expected at least one strategy, got none")
    *outer, nested = sorted(strategies, key=lambda strategy: isinstance(strategy, DefaultTrainingStepStrategy))
    for strategy in reversed(outer):
        innermost: TrainingStepStrategy = strategy
        while isinstance(innermost, NestingStepStrategy) and innermost.base_strategy not in (None, nested):
            assert innermost.base_strategy is not None
            innermost = innermost.base_strategy
        if not isinstance(innermost, NestingStepStrategy):
            raise ConfigError(
                f"compose_steps: {innermost!r} computes the whole step and cannot hold {nested!r}; put it last"
            )
        if any(inner is innermost for inner in _chain(nested)):
            raise ConfigError(f"compose_steps: {innermost!r} is given twice")
        innermost.base_strategy = nested
        nested = strategy
    return nested


def is_plain(strategy: TrainingStepStrategy) -> bool:
    """Return whether a step computes the plain forward pass and loss, so that its strategies only have hooks or setup.

    Example:
        >>> is_plain(GradientAccumulationStepStrategy(4)), is_plain(MultipleForwardPassStepStrategy(2))
        (True, False)
    """
    return all(
        not step.backward_options
        and type(step).loss is NestingStepStrategy.loss
        and type(step).differentiate is NestingStepStrategy.differentiate
        and type(step).training_step is SplitStepStrategy.training_step
        if isinstance(step, NestingStepStrategy)
        else type(step) is DefaultTrainingStepStrategy and not (step.create_graph or step.retain_graph)
        for step in _chain(strategy)
    )


def _differentiate(optimizer: Optimizer, loss: Tensor, context: TrainingContext, options: Options) -> None:
    # Without options, or if the step inside has done both, backward and step are left to the loop.
    if options and not context.run.batch.optimized:
        context.backward(loss, **options)
        context.step(optimizer)


def _chain(strategy: TrainingStepStrategy | None) -> Iterator[TrainingStepStrategy]:
    while strategy is not None:
        yield strategy
        strategy = strategy.base_strategy if isinstance(strategy, NestingStepStrategy) else None


def _enabled(**options: bool) -> dict[str, bool]:
    return {name: True for name, is_enabled in options.items() if is_enabled}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(value)
