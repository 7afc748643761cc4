"""Fleet of equal models: K models train as one model with a leading dimension, in the same loop.

Every tensor of the fleet has K rows, one for each member. Members have separate data of unequal size: a step takes the
next batch of every member that has one left; the others are finished. Optimizers that work element by element need no
change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from dovetail.data import DataLoader, split_batch
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.penalty import PenalizedLossStrategy
from dovetail.trainers.base import Trainer
from dovetail.trainers.catalog import losses
from dovetail.trainers.context import Phase, Plan, Stage
from dovetail.trainers.decorators import TrainerDecorator
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.trainers.strategies import (
    CompositeUpdateStrategy,
    CrossEntropyLossStrategy,
    DefaultLossCriterionStrategy,
    LossCriterionStrategy,
    ModelUpdateStrategy,
    Strategy,
    TrainingStepStrategy,
)
from dovetail.trainers.strategies.adapters import CallableLossStrategy
from dovetail.trainers.strategies.nesting import Nesting
from dovetail.trainers.whole_step.rules import clip_factor
from dovetail.units import Epochs, TrainUnit

_ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop)
# Losses that are means over samples, whatever else is in the batch.
_MEAN_FUNCTIONS = (F.cross_entropy, F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits)
_MEANS = (
    *(nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss),
    CrossEntropyLossStrategy,
)


@dataclass(frozen=True)
class Member:
    """One member of a fleet.

    Attributes:
        state: The initial weights of its model, by name.
        data: Its training data: tensors, or a dataset.
        seed: The seed of the order of its data.
        client_state: Its state, as in `context.client.state`.
        received: The payload that it received with the weights, as in `context.client.payload`.
    """

    state: Mapping[str, Tensor]
    data: Any
    seed: int
    client_state: Mapping[str, Any] = field(default_factory=dict)
    received: Mapping[str, Any] = field(default_factory=dict)


class FleetTrainer(TrainerDecorator):
    """Trains the models of all members at once, with the results of training them one after the other.

    Args:
        trainer: The trainer of one member, with the model of one member.
        members: The members.

    Attributes:
        num_updates: The number of optimizer steps of each member, known before training.
        losses: The mean training loss of each member in its last epoch.

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> x, y = torch.randn(12, 4), torch.zeros(12, dtype=torch.long)
        >>> trainer = ComposableTrainer(nn.Linear(4, 2), num_epochs=2, batch_size=4, verbose=False)
        >>> members = [Member(trainer.model.state_dict(), (x[:n], y[:n]), seed=n) for n in (12, 6)]
        >>> fleet = FleetTrainer(trainer, members)
        >>> fleet.train_together()
        >>> fleet.num_updates, fleet.state_of(1)["weight"].shape
        ([6, 4], torch.Size([2, 4]))
    """

    _sample_losses: Callable[[Any, Any], Tensor]
    _terms: list[PenalizedLossStrategy]
    # The label of samples that do not count, if the loss has one.
    _ignored: int | None

    def __init__(self, trainer: SingleProcessTrainer, members: Sequence[Member]) -> None:
        self._core = trainer
        self._one = trainer.model
        context = trainer.context
        self._member_loaders = [_loader(trainer, member) for member in members]
        self._phases = trainer.strategies.phases(int(context.config["epochs"]), context)
        epochs = sum(phase.epochs for phase in self._phases if not phase.is_detached)
        self.num_updates = [len(loader) * epochs for loader in self._member_loaders]
        self._step: _Step | None = None
        self._sums: Tensor | None = None
        self._counted: Tensor | None = None
        super().__init__(trainer)
        trainer.model = stack_models(self._one, [member.state for member in members]).to(context.device)
        context.client.is_fleet = True
        context.client.state = _rows([member.client_state for member in members])
        context.client.payload = _rows([dict(member.received) for member in members])

    @property
    def losses(self) -> list[float]:
        """The mean training loss of each member in its last epoch; NaN for one that had no batch."""
        assert self._sums is not None
        assert self._counted is not None
        return [float(value) for value in self._sums / self._counted]

    def state_of(self, position: int) -> dict[str, Tensor]:
        """Return the state of one member's model."""
        model = self.context.model
        assert model is not None
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return {
            name: value[position].detach() if name in parameters else value.detach()
            for name, value in model.state_dict().items()
        }

    def client_state_of(self, position: int) -> dict[str, Any]:
        """Return the client state of one member after training."""
        return cast("dict[str, Any]", _row(self.context.client.state, position))

    def payload_of(self, position: int) -> dict[str, Any]:
        """Return the payload that one member sends with its weights."""
        payload = self._core.strategies.model_update.get_update_payload(self.context)
        return cast("dict[str, Any]", _row(payload, position))

    def train_together(self) -> None:
        """Train all members for all their epochs."""
        first = self._member_loaders[0]
        # It is a loader already. The trainer would form batches of it once more.
        self._core._data.loaders["train"] = first, first
        self.fit(first)

    # ------------------------------------------------------------------ verbs

    def setup(self) -> None:
        """Replace the loss of one model by the losses of all members."""
        super().setup()
        core = self._core
        loss, self._terms = _without_terms(core.strategies.loss)
        criterion = loss.criterion(self.context) if self._terms else core.get_loss_criterion()
        # Once over members and once over samples, so that padded samples can be left out of each mean.
        self._sample_losses = vmap(vmap(lambda out, target: criterion(out.unsqueeze(0), target.unsqueeze(0))))
        # The trainer's own step calls `criterion`, so that no step is written twice.
        core.criterion = self._losses
        samples = _loss_of_samples(core)
        self._ignored = -100 if samples is F.cross_entropy else getattr(samples, "ignore_index", None)

    def plan(self, **options: TrainUnit | Mapping[str, int] | None) -> Plan:
        """Return the plan of one pass for each phase.

        All epochs of all members are one pass: a member that has fewer batches starts its next epoch earlier.
        """
        plan, context = super().plan(**options), self.context
        context.run.phases = tuple(replace(phase, epochs=1) for phase in self._phases)
        return replace(plan, max_length=Epochs(len(self._phases)))

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the steps of the fleet: the batches of all members, side by side."""
        return super().batches(stage) if stage != "train" else self._steps()

    def num_batches(self, stage: Stage) -> int | None:
        """Return the largest number of steps of a member."""
        return (
            super().num_batches(stage) if stage != "train" else max(map(len, self._member_loaders)) * self._phase.epochs
        )

    def batch_length(self, batch: Any) -> int:
        """Return how many samples all members have in a step."""
        return int(batch.counts.sum()) if isinstance(batch, _Step) else super().batch_length(batch)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the sum of the members' losses: the gradient of a member's row is the gradient of its loss."""
        context = self.context
        self._step, context.run.num_items = batch, batch.counts
        context.client.working = (batch.counts > 0).double()
        losses = super().train_step((batch.inputs, batch.targets))["loss"]
        # Otherwise the loop would check the default loss by the targets of one model.
        context.run.batch.uses_criterion = False
        self._note(losses.detach(), batch)
        return {"loss": losses.sum()}

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate the sum of the losses of all members."""
        super().backward(loss.sum(), **kwargs)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip the gradients of each member by the norm of this member alone."""
        limit = self._core.options.gradient_clip
        gradients = [it.grad for group in optimizer.param_groups for it in group["params"] if it.grad is not None]
        if limit and gradients:
            norms = [torch.linalg.vector_norm(it.reshape(len(it), -1), dim=1) for it in gradients]
            factor = clip_factor(norms, limit)
            for gradient in gradients:
                # One factor per member, with as many dimensions as the gradient.
                gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step all members, and restore the finished ones: momentum and weight decay would change them."""
        assert self._step is not None
        idle = self._step.idle
        if not len(idle):
            return super().optimizer_step(optimizer)
        parameters = [it for group in optimizer.param_groups for it in group["params"]]
        kept = [it.detach()[idle] for it in parameters]
        stepped = super().optimizer_step(optimizer)
        with torch.no_grad():
            for parameter, rows in zip(parameters, kept, strict=True):
                parameter[idle] = rows
        return stepped

    # ------------------------------------------------------------------ private

    @property
    def _phase(self) -> Phase:
        """The running phase, with its epochs."""
        return self._phases[min(self.context.progress.epoch, len(self._phases) - 1)]

    def _losses(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of each member: the mean over its samples without padding, and the terms of its weights."""
        assert self._step is not None
        counts, losses = self._step.counts, self._sample_losses(outputs, targets)
        is_real = torch.arange(losses.shape[1], device=losses.device) < counts.unsqueeze(1)
        # Not a product with a mask: the loss of a padded sample may be infinite, and infinity times 0 is NaN.
        value: Tensor = torch.where(is_real, losses, 0.0).sum(dim=1) / counts.clamp(min=1)
        for term in reversed(self._terms):
            value = term.penalized(value, self.context)
        return value

    def _check_phase(self) -> None:
        """Raise if a second phase would continue a schedule or optimizer state after unequal numbers of steps.

        These are shared by all members, and have counted the steps of the member with the most batches.
        """
        context = self.context
        if context.progress.updates == 0 or len(set(map(len, self._member_loaders))) == 1:
            return
        if any(bound.count for bound in context.schedulers):
            raise ConfigError("a schedule continues in a second phase, whose first step differs between clients")
        (optimizer,) = context.optimizers
        trained = [it for group in optimizer.param_groups for it in group["params"] if it.requires_grad]
        if any(optimizer.state.get(it) for it in trained):
            raise ConfigError(
                "the optimizer's state continues in a second phase, whose first step differs between clients"
            )

    def _steps(self) -> Iterator[_Step]:
        self._check_phase()
        epochs = self._phase.epochs
        first = sum(phase.epochs for phase in self._phases[: self.context.progress.epoch])
        streams = [_stream(loader, first, epochs) for loader in self._member_loaders]
        last = [len(loader) * (epochs - 1) for loader in self._member_loaders]
        # A batch of the right shape and type, from which an empty batch is sliced for finished members.
        nothing = split_batch(next(iter(self._member_loaders[0])))
        for number, pairs in enumerate(zip_longest(*streams)):
            counts = torch.tensor([0 if pair is None else len(pair[1]) for pair in pairs])
            inputs, targets = zip(*(pair or (nothing[0][:0], nothing[1][:0]) for pair in pairs), strict=True)
            if self._ignored is not None and bool((torch.cat(targets) == self._ignored).any()):
                raise ConfigError(f"samples with the label {self._ignored} do not count in the mean of a batch")
            yield _Step(
                pad_sequence(list(inputs), batch_first=True),
                pad_sequence(list(targets), batch_first=True),
                counts,
                torch.tensor([number >= begin for begin in last]),
                torch.tensor([position for position, pair in enumerate(pairs) if pair is None], dtype=torch.long),
            )

    def _note(self, losses: Tensor, batch: _Step) -> None:
        if self.context.run.is_detached:
            return
        if self._sums is None or self._counted is None or (self.context.progress.batch == 0):
            self._sums, self._counted = torch.zeros_like(losses), torch.zeros_like(losses)
        self._sums += torch.where(batch.is_last_epoch, losses * batch.counts, 0.0)
        self._counted += torch.where(batch.is_last_epoch, batch.counts, 0)


@dataclass
class _Step:
    """The batches of all members, padded to one size."""

    inputs: Tensor
    targets: Tensor
    counts: Tensor
    is_last_epoch: Tensor
    idle: Tensor


def stack_models(model: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> nn.Module:
    """Return a model with a row for each state in every parameter, that maps rows of inputs to rows of outputs.

    It has the names of the model. Buffers are shared: see `fleet_obstacle`.

    Example:
        >>> one = nn.Linear(3, 2)
        >>> many = stack_models(one, [one.state_dict()] * 5)
        >>> many.weight.shape, many(torch.zeros(5, 7, 3)).shape
        (torch.Size([5, 2, 3]), torch.Size([5, 7, 2]))
    """
    many = copy.deepcopy(model)
    # By the parameter of one model, so that layers that share a parameter still share it.
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in many.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                full = f"{prefix}.{name}" if prefix else name
                rows = torch.stack([state[full].to(parameter.device) for state in states])
                made[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]
    # A subclass keeps attributes, names of submodules and `isinstance` checks of the original class.
    kind = type(f"Fleet{type(model).__name__}", (_RowwiseModel, type(many)), {"one": (model,)})
    many.__class__ = kind
    return many


class _RowwiseModel(nn.Module):
    """Calls a model for every row of its parameters and inputs."""

    # In a tuple, so that the model is no submodule.
    one: tuple[nn.Module]

    def forward(self, inputs: Any) -> Any:
        (model,) = self.one
        buffers = dict(self.named_buffers())

        def call(parameters: dict[str, Tensor], row: Any) -> Any:
            return functional_call(model, {**parameters, **buffers}, (row,))

        return vmap(call)(dict(self.named_parameters()), inputs)


def fleet_obstacle(trainer: Trainer) -> str | None:
    """Return the reason why copies of a trainer cannot train as a fleet; None means that they can.

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> fleet_obstacle(ComposableTrainer(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), verbose=False))
        'Dropout draws random numbers'
    """
    return next(_obstacles(trainer), None)


def _obstacles(trainer: Trainer) -> Iterator[str]:
    if trainer.core is not trainer or not isinstance(trainer, SingleProcessTrainer):
        yield f"{type(trainer).__name__} is a layer around the trainer"
        return
    if not trainer._steps_by_default:
        yield f"{type(trainer).__name__} has its own train_step"
    yield from _in_modules(trainer.model)
    yield from _in_pieces(trainer)
    yield from _in_loss(trainer)
    yield from _in_optimizer(trainer)


def _in_modules(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"{name} draws random numbers"
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            # Instance norm without statistics handles each sample separately, so padding does not matter.
            module.track_running_stats or not isinstance(module, nn.modules.instancenorm._InstanceNorm)
        ):
            yield f"{name} computes statistics over the whole batch, but batches are padded"
        if isinstance(module, nn.RNNBase):
            yield f"{name} cannot be mapped over clients by torch.func.vmap"


def _in_pieces(trainer: SingleProcessTrainer) -> Iterator[str]:
    context, options = trainer.context, trainer.options
    if options.accumulation_steps > 1:
        yield "several batches share one update"
    if context.precision is not None:
        yield "it trains in mixed precision"
    if options.memory_format is not None:
        yield "it has a memory format"
    for strategy in trainer.strategies:
        yield from _in_strategy(strategy)
    callbacks = context.callbacks
    for hook in (*callbacks.on_step_start, *callbacks.on_step_end, *callbacks.on_gradients):
        owner = getattr(hook, "__self__", hook)
        if owner is not trainer._strategy_hooks:
            yield f"{type(owner).__name__} has a hook for every step"


def _in_strategy(strategy: Strategy) -> Iterator[str]:
    for part in strategy.parts if isinstance(strategy, Nesting) else ():
        yield from _in_strategy(part)
    name = type(strategy).__name__
    if strategy.vectorizes or isinstance(strategy, CompositeUpdateStrategy):
        return
    if isinstance(strategy, TrainingStepStrategy):
        yield f"{name} has its own step"
    elif isinstance(strategy, ModelUpdateStrategy):
        yield f"{name} handles the model of one client"
    elif type(strategy).on_gradients is not Strategy.on_gradients:
        yield f"{name} has a hook for every step"


def _in_loss(trainer: SingleProcessTrainer) -> Iterator[str]:
    criterion = _loss_of_samples(trainer)
    if isinstance(criterion, LossCriterionStrategy) and type(criterion) is not CrossEntropyLossStrategy:
        yield f"{type(criterion).__name__} may use more than one sample at a time"
    if criterion in _MEAN_FUNCTIONS:
        return
    if not isinstance(criterion, _MEANS):
        yield f"the loss {getattr(criterion, '__name__', type(criterion).__name__)} may not be a mean over samples"
    # The mean of a weighted loss is one over the weights of a batch.
    elif criterion.reduction != "mean" or getattr(criterion, "weight", None) is not None:
        yield "the loss is not an unweighted mean over samples"


def _in_optimizer(trainer: SingleProcessTrainer) -> Iterator[str]:
    optimizer, context = trainer.optimizer, trainer.context
    if len(context.optimizers) != 1:
        yield f"there are {len(context.optimizers)} optimizers"
    if type(optimizer) not in _ELEMENTWISE:
        yield f"{type(optimizer).__name__} may use whole tensors instead of single elements"
    for bound in context.schedulers:
        if bound.interval != "update":
            yield f"a schedule moves at every {bound.interval}, which is at a different step for each client"
        if bound.takes_metric:
            yield f"{type(bound.scheduler).__name__} follows a metric, which differs between clients"


def _loss_of_samples(trainer: SingleProcessTrainer) -> Any:
    """Return the object that computes the loss of samples: a function, a module, or any other strategy."""
    strategy, _ = _without_terms(trainer.strategies.loss)
    if type(strategy) not in (DefaultLossCriterionStrategy, CallableLossStrategy):
        return strategy
    config = trainer.context.config
    arguments = config.get("parameters", {}).get("loss_criterion", {})
    return strategy.loss_fn or losses.get(config.get("loss_criterion", "CrossEntropyLoss"))(**arguments)


def _without_terms(loss: Any) -> tuple[Any, list[PenalizedLossStrategy]]:
    """Return the loss of samples, and the terms of the weights around it, outermost first."""
    terms = []
    while isinstance(loss, PenalizedLossStrategy):
        terms.append(loss)
        loss = loss.inner
    return loss, terms


def _loader(trainer: SingleProcessTrainer, member: Member) -> DataLoader[Any]:
    trainer.context.state["order_seed"] = member.seed
    loader = trainer.get_train_loader(trainer._batch_size("train"), member.data, None)
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"{type(loader).__name__} is not a torch DataLoader")
    return loader


def _stream(loader: DataLoader[Any], first: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in range(first, first + epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            yield split_batch(batch)


def _rows(trees: Sequence[Any]) -> Any:
    """Stack nested dictionaries of tensors and numbers, which all have the same keys."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {name: _rows([tree[name] for tree in trees]) for name in first}
    return torch.stack([torch.as_tensor(tree) for tree in trees])


def _row(tree: Any, position: int) -> Any:
    if isinstance(tree, Mapping):
        return {name: _row(value, position) for name, value in tree.items()}
    return tree[position]
