"""Steps of users: the choice between two given steps, and updates that a step makes without the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.errors import ConfigError
from dovetail.trainers.capabilities import Compiled, DataParallel, Timed
from dovetail.trainers.strategies.base import TrainingStepStrategy
from dovetail.trainers.strategies.training_step import SplitStepStrategy, is_plain

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext
    from dovetail.trainers.single_process import SingleProcessTrainer

# Verbs that the loop calls for an update; a manual update bypasses them.
_UPDATE_VERBS = ("backward", "clip_gradients", "optimizer_step")


@dataclass
class WatchedStep:
    """Calls a step strategy, and counts an update that it makes with `optimizer.step()` instead of the context.

    Args:
        strategy: The strategy.
    """

    strategy: TrainingStepStrategy

    def training_step(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        examples: Any,
        labels: Any,
        loss_criterion: Callable[[Any, Any], Tensor],
        context: TrainingContext,
    ) -> Tensor:
        """Return the loss of a batch.

        Raises:
            ConfigError: The strategy made its update itself, and the run has settings that require the context.
        """
        step: Any = self.strategy.training_step
        if optimizer is None:
            loss: Tensor = step(model, optimizer, examples, labels, loss_criterion, context)
            return loss
        updates: list[Any] = []
        # Registered per step: a permanent hook would slow down every update.
        watch = optimizer.register_step_post_hook(lambda *call: updates.append(call))
        try:
            loss = step(model, optimizer, examples, labels, loss_criterion, context)
        finally:
            watch.remove()
        # A step through the context has already counted its update.
        if updates and optimizer not in context.run.batch.stepped:
            count_own_update(context, repr(self.strategy))
        return loss


def watch_step(strategy: TrainingStepStrategy) -> TrainingStepStrategy | WatchedStep:
    """Return the strategy if it leaves updates to the loop, else a `WatchedStep` that detects manual updates."""
    return strategy if isinstance(strategy, SplitStepStrategy) else WatchedStep(strategy)


def count_own_update(context: TrainingContext, name: str) -> None:
    """Count an update of the first optimizer that user code made with `loss.backward()` and `optimizer.step()`.

    Args:
        context: The context of the run.
        name: The code that made the update, for the error message.

    Raises:
        ConfigError: The run accumulates, clips, scales or averages gradients, has several optimizers, or a layer or
            subclass changes the update: a manual update would bypass all of these.
    """
    trainer, run = context.run.trainer, context.run
    assert trainer is not None
    core: Any = trainer.core
    unused = {
        "accumulation_steps": run.window.size > 1,
        "gradient_clip": core._clipping is not None,
        "a strategy or callback that changes gradients": bool(context.callbacks.on_gradients),
        "precision='fp16'": context.precision is not None and context.precision.scaler is not None,
        "averaging over several processes": context.process.has_peers,
        "more than one optimizer": len(context.optimizers) > 1,
    }
    for verb in _UPDATE_VERBS:
        # These only measure, do nothing without other processes, or make the same update.
        layers = [it for it in trainer._customized_by(verb) if not issubclass(it, (Compiled, DataParallel, Timed))]
        unused.update({f"{layer.__name__}.{verb}": True for layer in layers})
    for setting in (setting for setting, is_given in unused.items() if is_given):
        raise ConfigError(
            f"{name} makes its updates itself, so {setting} would have no effect: call context.backward(loss) and "
            "context.step(optimizer) in place of loss.backward() and optimizer.step()"
        )
    run.batch.optimized = True
    run.batch.stepped.extend(context.optimizers[:1])


def reject_two_steps(trainer: SingleProcessTrainer, strategy: TrainingStepStrategy) -> None:
    """Raise if the step of a strategy would never be used; a strategy that accumulates or clips fits any step.

    Raises:
        ConfigError: A step is given twice, or code of the user would ignore the weights of samples or classes.
    """
    if trainer.options.sample_weight and trainer._train_step is not None:
        raise ConfigError("sample_weight: the given train_step splits batches itself; weight its loss there")
    for name, is_given in (
        ("sample_weight", trainer.options.sample_weight),
        ("class_weight", trainer.options.class_weight is not None),
    ):
        if is_given and not trainer._is_default("get_loss_criterion"):
            raise ConfigError(f"{name}: get_loss_criterion of the subclass decides this; give one or the other")
    if is_plain(strategy):
        return
    # A method that calls `super()`, as a capability does, reaches the strategy.
    own = [vars(kind)["train_step"] for kind in trainer.core._customized_by("train_step")[:1]]
    if trainer._train_step is not None or any("super" not in step.__code__.co_names for step in own):
        raise ConfigError(
            f"train_step: {strategy!r} decides this; give one or the other, or a layer such as AMPTrainer"
        )
