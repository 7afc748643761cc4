"""Optimizers and schedulers of a trainer: construction, and the rates that options set."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer, SparseAdam

from dovetail.errors import ConfigError
from dovetail.trainers.bound_scheduler import bind_scheduler
from dovetail.trainers.context import defer_optimizers, stop_deferring
from dovetail.trainers.optimizers import requires_closure
from dovetail.trainers.schedules.applied import set_lr, set_momentum
from dovetail.trainers.schedules.whole_run import RunScheduleLR, set_run_lengths
from dovetail.trainers.strategies.adapters import as_scheduler

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext
    from dovetail.trainers.single_process import SingleProcessTrainer


class Optimization:
    """Builds the optimizers and schedulers of a trainer, and rebuilds them after a change.

    Attributes:
        assigned: The numbers (`learning_rate`, `momentum`, `weight_decay`) that were assigned after construction.
            Optimizers that are built later get them, too.
        has_schedulers: False if the schedulers must be built again for the same optimizers.
    """

    def __init__(self) -> None:
        self.assigned: set[str] = set()
        self.has_schedulers = True
        self._rates_are_checked = False

    def build_later(self, trainer: SingleProcessTrainer) -> None:
        """Build the missing parts of a run on first access: the training loader, the optimizers and the schedulers."""
        context = trainer.context
        # An earlier run has built them: they keep their state.
        if context.optimizers:
            self.build(trainer)
        else:
            defer_optimizers(context, partial(self._build_run, trainer))

    def _build_run(self, trainer: SingleProcessTrainer) -> None:
        # A subclass with its own `train_epoch` may have no training data in the trainer.
        if trainer.context.run.data.get("train") is not None:
            trainer._loader("train")
        self.build(trainer)

    def build(self, trainer: SingleProcessTrainer) -> None:
        """Build the optimizers and schedulers that the context of a trainer lacks; it must have a model."""
        context = trainer.context
        if context._deferred is not None:
            stop_deferring(context)
        if not context.optimizers or not self.has_schedulers:
            self._build_missing(trainer)
        if context.schedulers:
            set_run_lengths(trainer)
        if context.run.needs_closure:
            _check_closure(context)
        if context.process.has_peers and any(isinstance(it, SparseAdam) for it in context.optimizers):
            raise ConfigError(
                "an optimizer of sparse gradients (SparseAdam) cannot work in several processes, which average dense "
                "gradients; use Adam, and nn.Embedding with sparse=False"
            )

    def _build_missing(self, trainer: SingleProcessTrainer) -> None:
        """Build the optimizers if there are none, then the schedulers; after an error, keep neither."""
        context = trainer.context
        assert context.model is not None
        try:
            if not context.optimizers:
                optimizers = trainer.get_optimizer(context.model)
                context.optimizers.extend([optimizers] if isinstance(optimizers, Optimizer) else optimizers)
                context.run.needs_closure = any(map(requires_closure, context.optimizers))
                self._check_rates(trainer)
                # The configuration of a run may have another rate than the options.
                for name in self.assigned:
                    _write_rate(context, name, _wanted_rate(trainer, name))
            self._build_schedulers(trainer)
            self.has_schedulers = True
        except BaseException:
            # Otherwise the next run would find optimizers, build no schedulers, and train at a constant rate.
            context.optimizers.clear()
            context.schedulers.clear()
            raise

    def set_rate(self, trainer: SingleProcessTrainer, name: str, value: Any) -> None:
        """Set a number in every parameter group, now and whenever optimizers are built."""
        if trainer.context.model is not None:
            self.build(trainer)
            _write_rate(trainer.context, name, value)
        self.assigned.add(name)

    def _check_rates(self, trainer: SingleProcessTrainer) -> None:
        """Raise if an optimizer has its own value for a number that was given to the constructor."""
        if self._rates_are_checked:
            return
        groups = [group for optimizer in trainer.context.optimizers for group in optimizer.param_groups]
        for name, key in (("learning_rate", "lr"), ("momentum", "momentum"), ("weight_decay", "weight_decay")):
            if name not in trainer._given - self.assigned:
                continue
            wanted = _wanted_rate(trainer, name)
            found = [float(group[key]) for group in groups if key in group]
            # One group is enough: the others may have rates that the user chose.
            if found and not any(math.isclose(wanted, value, rel_tol=1e-6) for value in found):
                raise ConfigError(
                    f"{name}: the optimizer has its own, {found[0]:g}, so {wanted:g} would have no effect; give one or "
                    "the other"
                )
        # Once: schedules change the rates of an optimizer object, which a later run uses again.
        self._rates_are_checked = True

    def _build_schedulers(self, trainer: SingleProcessTrainer) -> None:
        """Build the learning-rate schedulers of all optimizers, and the momentum schedulers if the option has one."""
        context, schedule = trainer.context, trainer.options.mtm_scheduler
        for optimizer in context.optimizers:
            scheduler = trainer.get_lr_scheduler(context.config, optimizer)
            if isinstance(scheduler, list):
                # A list is complete: it contains the schedulers of all optimizers.
                context.schedulers.extend(scheduler)
                break
            if scheduler is not None and not _is_bound(context, scheduler):
                self._bind(trainer, scheduler)
        for optimizer in context.optimizers if schedule is not None else ():
            momentum = as_scheduler(schedule, optimizer)
            if momentum is not None and not _is_bound(context, momentum):
                context.schedulers.append(bind_scheduler(momentum))

    def _bind(self, trainer: SingleProcessTrainer, scheduler: Any) -> None:
        """Add a scheduler with its interval to the context; raise if it belongs to another optimizer."""
        context = trainer.context
        if isinstance(scheduler, RunScheduleLR):
            # It counts updates, whatever interval its strategy has.
            bound = bind_scheduler(scheduler)
        elif trainer._is_default("get_lr_scheduler"):
            bound = trainer.strategies.lr_scheduler.bind(scheduler, context)
        else:
            bound = bind_scheduler(scheduler, on_batch=trainer.options.scheduler_step_on_batch)
        if bound.optimizer not in context.optimizers:
            raise ConfigError(
                f"scheduler: {type(scheduler).__name__} schedules an optimizer that this trainer does not have; build "
                "it from the trainer's optimizer, or give a callable such as partial(StepLR, step_size=3)"
            )
        context.schedulers.append(bound)


def _check_closure(context: TrainingContext) -> None:
    """Raise if a setting of the run excludes an optimizer that evaluates the loss itself."""
    impossible = {
        "cannot accumulate gradients": context.run.window.size > 1,
        "needs full precision": context.precision is not None,
        "cannot work in several processes": context.process.has_peers,
    }
    for reason in (reason for reason, is_given in impossible.items() if is_given):
        raise ConfigError(f"an optimizer that evaluates the loss itself (LBFGS) {reason}")


def _is_bound(context: TrainingContext, scheduler: Any) -> bool:
    """Return whether a scheduler is already bound, because one object was given for several optimizers."""
    return any(bound.scheduler is scheduler for bound in context.schedulers)


def _wanted_rate(trainer: SingleProcessTrainer, name: str) -> float:
    wanted: float = trainer.context.config["lr"] if name == "learning_rate" else getattr(trainer.options, name)
    return wanted


def _write_rate(context: TrainingContext, name: str, value: float) -> None:
    for optimizer in context.optimizers:
        for group in optimizer.param_groups:
            RATES[name](group, value)


def _set_weight_decay(group: dict[str, Any], value: float) -> None:
    if "weight_decay" not in group:
        raise ConfigError("weight_decay: expected an optimizer with 'weight_decay', got one that has none")
    group["weight_decay"] = value


# Numbers of an optimizer, and how they are written into a parameter group.
RATES: dict[str, Callable[[dict[str, Any], float], None]] = {
    "learning_rate": set_lr,
    "momentum": set_momentum,
    "weight_decay": _set_weight_decay,
}
