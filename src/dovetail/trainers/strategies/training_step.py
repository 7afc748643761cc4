"""How one batch is computed.

A step here is two things: a loss, and how it is differentiated. Every strategy changes one of them, or a setting of the
context, and leaves the rest to the strategy inside it. So they nest in any order, and accumulation, precision and
clipping stay what the loop makes of them.
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
    """A step in two halves, which strategies around it can reach: the loss, and how it is differentiated."""

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
        """Differentiate the loss and step, or do nothing: the loop then does both.

        Args:
            model: The module that is trained.
            optimizer: The optimizer to step.
            loss: What `loss` returned.
            context: The run.
            options: What the strategies around this one want `backward` to be given.
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
        """Return the loss of a batch, differentiated if somebody inside wants it done in a way of their own."""
        loss = self.loss(model, optimizer, examples, labels, loss_criterion, context)
        self.differentiate(model, optimizer, loss, context, {})
        return loss


@dataclass(eq=False, repr=False)
class DefaultTrainingStepStrategy(Described, SplitStepStrategy):
    """Forward, loss, backward, step: what is inside all others.

    Args:
        create_graph: Differentiate so that gradients can be differentiated again. Also `config["create_graph"]`.
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
        self._options = _wanted(create_graph=self.create_graph, retain_graph=self.retain_graph)

    def on_train_start(self, context: TrainingContext) -> None:
        """Read the configuration of the run."""
        self._options = _wanted(
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
        # The step of most trainers: the usual batch costs no further Python call.
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
        """Differentiate and step where `backward` is to be given something; else leave it to the loop."""
        _differentiate(optimizer, loss, context, {**options, **self._options})


@dataclass(eq=False, repr=False)
class NestingStepStrategy(Nesting, SplitStepStrategy):
    """A step around another one. Override `loss`, `differentiate` or a hook; each passes on to the step inside.

    Args:
        base_strategy: The step inside; None for a forward pass and its loss.

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
        """Leave it to the step inside, with what this one wants `backward` to be given."""
        options = {**options, **self.backward_options}
        if isinstance(self.base_strategy, SplitStepStrategy):
            self.base_strategy.differentiate(model, optimizer, loss, context, options)
        else:
            _differentiate(optimizer, loss, context, options)


@dataclass(eq=False, repr=False)
class GradientAccumulationStepStrategy(NestingStepStrategy):
    """Several batches share one update, whose gradient is that of one large batch.

    The loop keeps the window: the last, shorter one of an epoch is closed and divided by its real length, and hooks,
    schedules and counters see updates, not batches.

    Args:
        accumulation_steps: Batches in a full window.
        create_graph: Differentiate so that gradients can be differentiated again.
        base_strategy: The step inside; None for a plain one.

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
        self.backward_options = _wanted(create_graph=self.create_graph)

    def setup(self, context: TrainingContext) -> None:
        """Set the size of the window.

        Raises:
            ConfigError: Somebody else has set another size.
        """
        window = context.run.window
        if window.size not in (1, self.accumulation_steps):
            raise ConfigError(
                f"accumulation_steps: {self!r} meets a window of {window.size} batches; accumulate in one place"
            )
        window.size = self.accumulation_steps
        super().setup(context)

    def teardown(self, context: TrainingContext) -> None:
        """Give the window its usual size back."""
        context.run.window.size = 1
        super().teardown(context)


@dataclass(eq=False, repr=False)
class MixedPrecisionStepStrategy(NestingStepStrategy):
    """Forward and loss in lower precision where that is safe; in float16 with a scaled loss.

    It sets the precision of the run. The loop computes under autocast; the trainer scales, unscales before gradients
    are clipped, skips the step of gradients that overflowed and does not count it. The scaler is kept in checkpoints.

    Args:
        enabled: False for full precision. None where the device gains by it, which a CPU does not; True everywhere.
        create_graph: Differentiate so that gradients can be differentiated again.
        precision: `bf16`, `fp16` or `fp32`; `auto` for the best of the device.
        base_strategy: The step inside; None for a plain one.

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
        self.backward_options = _wanted(create_graph=self.create_graph)
        # Says at once what is wrong with a name.
        Precision(self.precision)

    def setup(self, context: TrainingContext) -> None:
        """Give the context its precision."""
        device_type = context.device.type
        name: PrecisionName = "fp32" if self.enabled is False else self.precision
        if self.enabled and name == "auto" and device_type == "cpu":
            name = "bf16"
        made = Precision(name, device_type)
        self._precision = context.precision = None if made.dtype is torch.float32 else made
        super().setup(context)

    def teardown(self, context: TrainingContext) -> None:
        """Take the precision away."""
        context.precision = None
        super().teardown(context)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and that of the step inside."""
        scaler = {} if self._precision is None else self._precision.state_dict()
        return super().state_dict() | ({"scaler": scaler} if scaler else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        super().load_state_dict(state)
        if self._precision is not None:
            self._precision.load_state_dict(state.get("scaler", {}))


@dataclass(eq=False, repr=False)
class GradientClippingStepStrategy(NestingStepStrategy):
    """A step whose gradients are clipped by their norm once they are complete and unscaled, before the optimizer steps.

    Args:
        max_norm: The largest norm of an optimizer's gradients.
        norm_type: Which norm.
        base_strategy: The step inside; None for a plain one.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> GradientClippingStepStrategy(max_norm=1.0).on_gradients(torch.optim.SGD([weight]), context=None)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """

    max_norm: float = 1.0
    norm_type: float = 2.0
    clipping: Clipping = field(init=False)

    def __post_init__(self) -> None:
        self.clipping = Clipping("GradientClippingStepStrategy", self.max_norm, norm_type=self.norm_type)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Clip what the optimizer is about to use."""
        super().on_gradients(optimizer, context)
        self.clipping.apply(optimizer)


@dataclass(eq=False, repr=False)
class CustomBackwardStepStrategy(NestingStepStrategy):
    """A step whose loss is differentiated by a function.

    The function is called with the loss of every batch before it is differentiated. It does one of two things:

    * It differentiates, by `context.backward(loss)`, as often and of whatever it likes. The optimizer steps
      afterwards, when the window closes. `loss.backward()` would miss accumulation and scaling.
    * It never calls `context.backward`, and only adds to `.grad` what the loss does not know of. The loss is
      differentiated after it, on top.

    Gradients are those of the window so far, times the scale of float16, at this point. Whoever changes complete
    gradients (clips, adds noise) does so in `on_gradients`.

    Args:
        backward_hook: A function of the model, the loss and the context.
        base_strategy: The step inside; None for a plain one. Its own wishes for `backward` are the function's to heed.

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
        """Call the function, and step if it has differentiated."""
        self.backward_hook(model, loss, context)
        if context.run.batch.optimized and optimizer not in context.run.batch.stepped:
            context.step(optimizer)


@dataclass(eq=False, repr=False)
class MultipleForwardPassStepStrategy(NestingStepStrategy):
    """Several forward passes over one batch, of a model that is random (dropout) or of a step that is.

    Args:
        num_passes: How many.
        aggregate_fn: Makes one loss of the list of them; None for their mean.
        base_strategy: The step inside, which runs once per pass; None for a plain one.

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
    """Another step, with a look at its numbers: NaN and infinity are told of before they reach the parameters.

    Every look waits for the device. Under float16 gradients are left to the scaler, for which an overflow is no error.

    Args:
        check_inputs: Look at examples and labels.
        check_outputs: Look at the model's outputs and the loss.
        check_gradients: Look at complete gradients, before the optimizer steps.
        raise_on_error: Raise instead of warning.
        base_strategy: The step that is looked at; None for a plain one.

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
        """Return the loss of a batch that was looked at."""
        if self.check_inputs:
            self._look_at(examples, "the examples of the batch", DataError)
            self._look_at(labels, "the labels of the batch", DataError)
        if not self.check_outputs:
            return super().loss(model, optimizer, examples, labels, loss_criterion, context)

        def looked_at(outputs: Any, labels: Any) -> Tensor:
            self._look_at(outputs, "the outputs of the model", NonFiniteLossError)
            loss = loss_criterion(outputs, labels)
            self._look_at(loss, "the loss", NonFiniteLossError)
            return loss

        return super().loss(model, optimizer, examples, labels, looked_at, context)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Look at what the optimizer is about to use, before anybody inside changes it."""
        if self.check_gradients and (context.precision is None or context.precision.scaler is None):
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            self._look_at(gradients, "the gradients", NonFiniteLossError)
        super().on_gradients(optimizer, context)

    def _look_at(self, values: Any, what: str, error: type[Exception]) -> None:
        if all(tensor.isfinite().all() for tensor in _tensors(values)):
            return
        message = f"NaN or infinity in {what}"
        if self.raise_on_error:
            raise error(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def compose_steps(*strategies: TrainingStepStrategy) -> TrainingStepStrategy:
    """Return one step of several: each is put inside the one before it, so the first is the outermost.

    A step that cannot hold another, such as one of your own that computes everything itself, comes last. The default
    step is the innermost wherever it stands.

    Raises:
        ConfigError: There is none, one is given twice, or one that cannot hold another does not come last.

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
    """Whether a step is forward, loss, backward and step, and the strategy only sets something up, or listens.

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
    if options and not context.run.batch.optimized:
        context.backward(loss, **options)
        context.step(optimizer)


def _chain(strategy: TrainingStepStrategy | None) -> Iterator[TrainingStepStrategy]:
    while strategy is not None:
        yield strategy
        strategy = strategy.base_strategy if isinstance(strategy, NestingStepStrategy) else None


def _wanted(**options: bool) -> dict[str, bool]:
    return {name: True for name, is_wanted in options.items() if is_wanted}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (Mapping, list, tuple)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(value)
