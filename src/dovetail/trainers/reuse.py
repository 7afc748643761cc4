"""Preparation of a trainer for another run: reset, configuration, strategies, and training from the start.

Use these functions when one trainer makes many runs in turn, each with its own data, configuration and strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.history import History
from dovetail.trainers.metrics import Meter
from dovetail.trainers.own_steps import reject_two_steps
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.trainers.strategies.bundle import check_roles
from dovetail.units import Progress

__all__ = ["configure", "equip", "fit_new_run", "reset"]


def reset(trainer: SingleProcessTrainer) -> None:
    """Reset progress, history, optimizer state and the best result of a trainer; the model stays.

    Example:
        >>> import torch
        >>> from dovetail import Trainer
        >>> trainer = Trainer(torch.nn.Linear(2, 2), num_epochs=1, verbose=False)
        >>> _ = trainer.fit((torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)))
        >>> reset(trainer)
        >>> trainer.context.progress.epoch, len(trainer.history.losses)
        (0, 0)
    """
    context = trainer.context
    context.progress, context.history, context.run.meter = Progress(), History(), Meter()
    for optimizer in context.optimizers:
        # An optimizer object of the user is used again, so clear its state.
        optimizer.state.clear()
    context.optimizers.clear()
    context.schedulers.clear()
    # The next plan creates a saver that does not know the best value of this run.
    context.run.validated_at, context.run.validation, context.run.saver = -1, {}, None
    trainer._data.reset()


def configure(trainer: SingleProcessTrainer, config: Mapping[str, Any]) -> None:
    """Set the configuration of the next run: `config` over the trainer's own; earlier calls have no effect."""
    trainer.context.config = {**trainer._own_config, **config}


def fit_new_run(
    trainer: SingleProcessTrainer, trainset: Any, sampler: Any = None, config: Mapping[str, Any] | None = None
) -> None:
    """Reset a trainer, and train it on a training set.

    Args:
        trainer: The trainer.
        trainset: Training data, as for `fit`.
        sampler: Indices, a torch sampler, or an object with `.get()`; None means all data.
        config: The configuration, as for `configure`; None keeps the current one.
    """
    reset(trainer)
    if config is not None:
        configure(trainer, config)
    trainer._sampler = sampler
    # The sampler may be another one for the same dataset, by which loaders are found.
    trainer._data.forget_loaders()
    trainer.fit(trainset)


def equip(trainer: SingleProcessTrainer, **strategies: Any) -> None:
    """Replace strategies of a trainer before a run; a new strategy may contain the current one.

    Args:
        trainer: A trainer that is not running.
        strategies: By role: `loss`, `optimizer`, `training_step`, `lr_scheduler`, `model_update`, `data_loader`,
            `testing`.

    Raises:
        ConfigError: There is no such role, a strategy has another role, or the trainer is running or closed.
    """
    if not strategies:
        return
    context = trainer.context
    if context.run.trainer is not None:
        raise ConfigError("equip: the trainer is running; replace its strategies before or after a run")
    check_roles(strategies)
    reject_two_steps(trainer, strategies.get("training_step", trainer.strategies.training_step))
    context.run.loss_is_default &= "loss" not in strategies
    if not trainer.strategies.is_set_up:
        raise ConfigError("equip: the trainer is closed: its strategies are torn down; make a new one")
    # This finalizer tears down the present strategies; `_follow_strategies` creates one for the new ones.
    trainer._closing.detach()
    if trainer._strategy_hooks is not None:
        context.callbacks.remove(trainer._strategy_hooks)
    # Strategies that stay are already set up. A new strategy sets up the strategies inside it.
    for role in strategies:
        present = getattr(trainer.strategies, role)
        if present is not None:
            present.teardown(context)
    present_roles = trainer.strategies.given
    trainer.strategies = replace(trainer.strategies, **strategies, given=present_roles | strategies.keys())
    for added in strategies.values():
        added.setup(context)
    trainer.strategies.is_set_up = True
    trainer._follow_strategies()
    # The next setup builds it from the new loss strategy.
    trainer.criterion = None
    if trainer._strategy_hooks is not None:
        context.callbacks.add(trainer._strategy_hooks, first=True)
