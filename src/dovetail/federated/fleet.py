"""Many models at once: a fleet of K equal models is one model with a leading dimension, run by the same loop.

Every tensor of the fleet has K rows, one for each member. Members have data of their own, of unequal size: a step takes
the next batch of everybody who has one left, and whoever has none is done. Optimizers that work element by element, and
their state, need not know.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from dovetail.units import Epochs, TrainUnit

__all__ = ["FleetTrainer", "Member", "stacked", "why_alone"]

_ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop)
# Losses that are means over samples, whatever else is in the batch.
_MEAN_FUNCTIONS = (F.cross_entropy, F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits)
_MEANS = (nn.CrossEntropyLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss)


@dataclass(frozen=True)
class Member:
    """One of a fleet.

    Attributes:
        state: What its model begins with, by name.
        data: What it trains on: tensors, or a dataset.
        seed: Of the order of its data.
        kept: What it keeps, as in `context.client.state`.
        received: What it was sent besides the weights, as in `context.client.payload`.
    """

    state: Mapping[str, Tensor]
    data: Any
    seed: int
    kept: Mapping[str, Any] = field(default_factory=dict)
    received: Mapping[str, Any] = field(default_factory=dict)


class FleetTrainer(TrainerDecorator):
    """Trains the models of many at once, each as its own trainer would.

    Args:
        trainer: How each of them trains; its model is one of theirs.
        members: Who trains.

    Attributes:
        num_updates: How many steps each member has made, or will have made.
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

    def __init__(self, trainer: SingleProcessTrainer, members: Sequence[Member]) -> None:
        self._core = trainer
        self._one = trainer.model
        context = trainer.context
        self._member_loaders = [_loader(trainer, member) for member in members]
        self._phases = trainer.strategies.phases(int(context.config["epochs"]), context)
        epochs = sum(phase.epochs for phase in self._phases if not phase.is_detached)
        self.num_updates = [len(loader) * epochs for loader in self._member_loaders]
        self._idle = torch.empty(0, dtype=torch.long)
        self._sums: Tensor | None = None
        self._counted: Tensor | None = None
        super().__init__(trainer)
        trainer.model = stacked(self._one, [member.state for member in members]).to(context.device)
        context.client.is_fleet = True
        context.client.state = _rows([member.kept for member in members])
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

    def kept_by(self, position: int) -> dict[str, Any]:
        """Return what one member keeps."""
        return cast("dict[str, Any]", _row(self.context.client.state, position))

    def sent_by(self, position: int) -> dict[str, Any]:
        """Return what one member sends besides its weights."""
        payload = self._core.strategies.model_update.get_update_payload(self.context)
        return cast("dict[str, Any]", _row(payload, position))

    def train_together(self) -> None:
        """Train all members to their ends."""
        self.fit(self._member_loaders[0])

    # ------------------------------------------------------------------ verbs

    def plan(self, **wishes: TrainUnit | Mapping[str, int] | None) -> Plan:
        """Return the plan of one pass for each phase.

        All epochs of all members are one pass: a member that has fewer batches begins its next epoch earlier.
        """
        plan, context = super().plan(**wishes), self.context
        context.run.phases = tuple(replace(phase, epochs=1) for phase in self._phases)
        return replace(plan, max_length=Epochs(len(self._phases)))

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the steps of the fleet: the batches of all members, side by side."""
        return super().batches(stage) if stage != "train" else self._steps()

    def num_batches(self, stage: Stage) -> int | None:
        """Return the steps of whoever has most."""
        return (
            super().num_batches(stage) if stage != "train" else max(map(len, self._member_loaders)) * self._phase.epochs
        )

    def _batch_length(self, batch: Any) -> int:
        """Return how many samples all members have in a step."""
        return int(batch.counts.sum()) if isinstance(batch, _Step) else super()._batch_length(batch)

    def to_device(self, batch: Any) -> Any:
        """Move a step of the fleet."""
        if not isinstance(batch, _Step):
            return super().to_device(batch)
        move = super().to_device
        return _Step(move(batch.inputs), move(batch.targets), move(batch.counts), move(batch.is_last_epoch), batch.idle)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the sum of the members' losses: the gradient of each is that of its own loss."""
        context, strategy = self.context, self._core.strategies.training_step
        assert context.model is not None
        self._idle, context.run.num_items = batch.idle, batch.counts
        context.client.working = (batch.counts > 0).double()
        criterion = partial(self._losses, batch.counts)
        context.state["current_batch"] = context.progress.batch
        optimizer = context.optimizers[0]
        losses = strategy.training_step(context.model, optimizer, batch.inputs, batch.targets, criterion, context)
        self._note(losses.detach(), batch)
        return {"loss": losses.sum()}

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate the losses of all."""
        super().backward(loss.sum(), **kwargs)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip the gradients of every member for itself."""
        limit = self._core.options.gradient_clip
        if not limit:
            return
        gradients = [it.grad for group in optimizer.param_groups for it in group["params"] if it.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(it.flatten(1), dim=1) for it in gradients])
        scale = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step for all, and put back who is done: momentum and decay would move them on."""
        idle = self._idle
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

    def _losses(self, counts: Tensor, outputs: Any, targets: Any) -> Tensor:
        """The loss of each member: the mean over the samples that it really has, and what depends on its weights."""
        loss: Any = self._core.strategies.loss
        terms = []
        while isinstance(loss, PenalizedLossStrategy):
            terms.append(loss)
            loss = loss.inner
        criterion = self._criterion_of(loss)
        each = vmap(vmap(lambda out, target: criterion(out.unsqueeze(0), target.unsqueeze(0))))
        losses = each(outputs, targets)
        is_real = torch.arange(losses.shape[1], device=losses.device) < counts.unsqueeze(1)
        # Not a product: what a padded sample gives may be infinite.
        value: Tensor = torch.where(is_real, losses, 0.0).sum(dim=1) / counts.clamp(min=1)
        for term in reversed(terms):
            value = term.penalized(value, self.context)
        return value

    def _criterion_of(self, loss: LossCriterionStrategy) -> Any:
        if loss is self._core.strategies.loss:
            return self._core.criterion
        return loss.criterion(self.context)

    def _steps(self) -> Iterator[_Step]:
        before = self._phases[: min(self.context.progress.epoch, len(self._phases) - 1)]
        first, epochs = sum(phase.epochs for phase in before), self._phase.epochs
        streams = [_stream(loader, first, epochs) for loader in self._member_loaders]
        last = [len(loader) * (epochs - 1) for loader in self._member_loaders]
        nothing = split_batch(next(iter(self._member_loaders[0])))
        for number in range(max(map(len, self._member_loaders)) * epochs):
            pairs = [next(stream, None) for stream in streams]
            counts = torch.tensor([0 if pair is None else len(pair[1]) for pair in pairs])
            inputs, targets = zip(*(pair or (nothing[0][:0], nothing[1][:0]) for pair in pairs), strict=True)
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


def stacked(model: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> nn.Module:
    """Return a model with a row for each state in every parameter, that maps rows of inputs to rows of outputs.

    Its names are those of the model. Buffers are shared: see `why_alone`.

    Example:
        >>> one = nn.Linear(3, 2)
        >>> many = stacked(one, [one.state_dict()] * 5)
        >>> many.weight.shape, many(torch.zeros(5, 7, 3)).shape
        (torch.Size([5, 2, 3]), torch.Size([5, 7, 2]))
    """
    many = copy.deepcopy(model)
    # By the parameter of one, so that layers that share it go on to do so.
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
    kind = type(f"Fleet{type(model).__name__}", (_Rows, type(many)), {"one": (model,)})
    many.__class__ = kind
    return many


class _Rows(nn.Module):
    """Calls a model for every row of its parameters and inputs."""

    # In a tuple, so that the model is no submodule.
    one: tuple[nn.Module]

    def forward(self, inputs: Any) -> Any:
        (model,) = self.one
        buffers = dict(self.named_buffers())

        def call(parameters: dict[str, Tensor], row: Any) -> Any:
            return functional_call(model, {**parameters, **buffers}, (row,))

        return vmap(call)(dict(self.named_parameters()), inputs)


def why_alone(trainer: Trainer) -> str | None:
    """Return what about a trainer keeps many of its kind from training as one; None if nothing does.

    Example:
        >>> from dovetail.trainers.composable import ComposableTrainer
        >>> why_alone(ComposableTrainer(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), verbose=False))
        'Dropout draws random numbers'
    """
    if trainer._innermost is not trainer or not isinstance(trainer, SingleProcessTrainer):
        return f"{type(trainer).__name__} is a layer around the trainer"
    if not trainer._steps_by_default:
        return f"{type(trainer).__name__} has its own train_step"
    return _module_alone(trainer.model) or _pieces_alone(trainer) or _loss_alone(trainer) or _optimizer_alone(trainer)


def _module_alone(model: nn.Module) -> str | None:
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} draws random numbers"
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.track_running_stats or not isinstance(module, nn.modules.instancenorm._InstanceNorm)
        ):
            return f"{name} looks at the whole batch, and batches are padded"
        if isinstance(module, nn.RNNBase):
            return f"{name} cannot be mapped over rows"
    return None


def _pieces_alone(trainer: SingleProcessTrainer) -> str | None:
    strategies, context, options = trainer.strategies, trainer.context, trainer.options
    if options.accumulation_steps > 1:
        return "several batches share one update"
    if context.precision is not None:
        return "it trains in mixed precision"
    if options.memory_format is not None:
        return "it has a memory format"
    for strategy in strategies:
        if reason := _strategy_alone(strategy):
            return reason
    own = trainer._strategy_hooks
    for hooks in (context.callbacks.on_step_start, context.callbacks.on_step_end, context.callbacks.on_gradients):
        for hook in hooks:
            owner = getattr(hook, "__self__", hook)
            if owner is not own:
                return f"{type(owner).__name__} wants to see every step"
    return None


def _strategy_alone(strategy: Strategy) -> str | None:
    """What a strategy does that is not known to serve a fleet."""
    if isinstance(strategy, Nesting):
        reasons = (_strategy_alone(part) for part in strategy.parts)
        if reason := next((it for it in reasons if it), None):
            return reason
    if strategy.vectorizes or isinstance(strategy, CompositeUpdateStrategy):
        return None
    name = type(strategy).__name__
    if isinstance(strategy, TrainingStepStrategy):
        return f"{name} has its own step"
    if isinstance(strategy, ModelUpdateStrategy):
        return f"{name} looks at one model"
    if type(strategy).on_gradients is not Strategy.on_gradients:
        return f"{name} wants to see every step"
    return None


def _loss_alone(trainer: SingleProcessTrainer) -> str | None:
    strategy = trainer.strategies.loss
    while isinstance(strategy, PenalizedLossStrategy):
        strategy = strategy.inner
    if type(strategy) is CrossEntropyLossStrategy:
        is_mean = strategy.reduction == "mean" and strategy.weight is None
        return None if is_mean else "the loss is no plain mean over samples"
    if type(strategy) not in (DefaultLossCriterionStrategy, CallableLossStrategy):
        return f"{type(strategy).__name__} may look at more than one sample"
    config = trainer.context.config
    arguments = config.get("parameters", {}).get("loss_criterion", {})
    named = losses.get(config.get("loss_criterion", "CrossEntropyLoss"))
    criterion = cast(DefaultLossCriterionStrategy, strategy).loss_fn or named(**arguments)
    if criterion in _MEAN_FUNCTIONS:
        return None
    if not isinstance(criterion, _MEANS):
        return f"the loss {getattr(criterion, '__name__', type(criterion).__name__)} may be no mean over samples"
    # The mean of a weighted loss is one over the weights of a batch.
    is_mean = criterion.reduction == "mean" and getattr(criterion, "weight", None) is None
    return None if is_mean else "the loss is no plain mean over samples"


def _optimizer_alone(trainer: SingleProcessTrainer) -> str | None:
    optimizer = trainer.optimizer
    if len(trainer.context.optimizers) != 1:
        return f"there are {len(trainer.context.optimizers)} optimizers"
    if type(optimizer) not in _ELEMENTWISE:
        return f"{type(optimizer).__name__} may look at whole tensors"
    for bound in trainer.context.schedulers:
        if bound.interval != "update":
            return f"a schedule moves at every {bound.interval}, which comes at another step for everyone"
    return None


def _loader(trainer: SingleProcessTrainer, member: Member) -> DataLoader[Any]:
    trainer.context.state["order_seed"] = member.seed
    loader = trainer.get_train_loader(trainer._batch_size("train"), member.data, None)
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"{type(loader).__name__} is a loader of its own kind")
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
