"""plato's composable trainer: every concern is a strategy that can be replaced alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from dovetail import checkpoint as store
from dovetail.compat.plato.trainers.basic import Trainer
from dovetail.errors import CheckpointError, ConfigError
from dovetail.trainers.frozen import with_base
from dovetail.trainers.processes import train_in_process
from dovetail.trainers.recipe import CONFLICTS, SPELLINGS, as_strategy
from dovetail.trainers.reuse import equip
from dovetail.trainers.strategies import (
    DefaultDataLoaderStrategy,
    DefaultLossCriterionStrategy,
    DefaultOptimizerStrategy,
    DefaultTestingStrategy,
    DefaultTrainingStepStrategy,
    NoOpUpdateStrategy,
    NoSchedulerStrategy,
)

__all__ = ["ComposableTrainer"]


class _StrategyAttribute:
    """A strategy of a trainer as an attribute; assigning one replaces it between two runs."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __get__(self, trainer: ComposableTrainer | None, owner: type[Any] | None = None) -> Any:
        return self if trainer is None else getattr(trainer.strategies, self._role)

    def __set__(self, trainer: ComposableTrainer, strategy: Any) -> None:
        # Not a plain assignment: the old strategy is torn down, and the new one is set up.
        equip(trainer, **{self._role: as_strategy(self._role, strategy)})


class ComposableTrainer(Trainer):
    """A trainer whose every concern is a strategy that can be replaced alone.

    Every strategy has a default: cross entropy, SGD, a plain step, a constant rate, no update rule, data in the given
    order, accuracy. A strategy may be an instance, a class, a plain callable or torch object (`F.cross_entropy`,
    `partial(AdamW, lr=1e-3)`), or a name (`"AdamW"`); steps and updates may be lists, which are composed.

    The constructor sets the strategies up. Every run calls their `on_train_start`. They are torn down once: by
    `close()`, at the end of a `with` block, or when the trainer is deleted.

    With `max_concurrency=n`, `train` and `obtain_model_update` work in a spawned process, at most n of which run at
    once, and the trainer ends as if it had trained itself; see `dovetail.trainers.processes.train_in_process`.

    Args:
        model: A module, or a class or function that makes one.
        callbacks: Callbacks, as instances or classes.
        loss_strategy: Computes the loss.
        optimizer_strategy: Creates the optimizer.
        training_step_strategy: Computes one batch.
        lr_scheduler_strategy: Changes the learning rate.
        model_update_strategy: Hooks around updates, and the payload that a client sends besides its weights.
        data_loader_strategy: Builds batches of a training set.
        testing_strategy: Tests a model, in `test`.
        options: The other arguments and options of `dovetail.Trainer`.

    Example:
        >>> import torch
        >>> from dovetail import Epochs
        >>> from dovetail.trainers.strategies import AdamOptimizerStrategy
        >>> x = torch.randn(64, 4); y = (x.sum(dim=1) > 0).long()
        >>> trainer = ComposableTrainer(
        ...     model=torch.nn.Linear(4, 2), optimizer_strategy=AdamOptimizerStrategy(lr=0.1), verbose=False
        ... )
        >>> history = trainer.fit((x, y), max_length=Epochs(20))
        >>> trainer.test((x, y)) > 0.9
        True
    """

    loss_strategy = _StrategyAttribute("loss")
    optimizer_strategy = _StrategyAttribute("optimizer")
    training_step_strategy = _StrategyAttribute("training_step")
    lr_scheduler_strategy = _StrategyAttribute("lr_scheduler")
    model_update_strategy = _StrategyAttribute("model_update")
    data_loader_strategy = _StrategyAttribute("data_loader")
    testing_strategy = _StrategyAttribute("testing")

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        callbacks: Iterable[Any] | None = None,
        loss_strategy: Any = None,
        optimizer_strategy: Any = None,
        training_step_strategy: Any = None,
        lr_scheduler_strategy: Any = None,
        model_update_strategy: Any = None,
        data_loader_strategy: Any = None,
        testing_strategy: Any = None,
        **options: Any,
    ) -> None:
        def default(role: str, strategy: Any, make: Callable[[], Any]) -> Any:
            # An option such as `optim_function` is an answer, too: no default takes its place.
            named = {SPELLINGS.get(name, name) for name in options}
            is_answered = strategy is not None or CONFLICTS.get(role, frozenset()) & named
            return strategy if is_answered else make()

        super().__init__(
            model,
            callbacks=callbacks,
            loss_strategy=default("loss", loss_strategy, DefaultLossCriterionStrategy),
            optimizer_strategy=default("optimizer", optimizer_strategy, DefaultOptimizerStrategy),
            training_step_strategy=default("training_step", training_step_strategy, DefaultTrainingStepStrategy),
            lr_scheduler_strategy=default("lr_scheduler", lr_scheduler_strategy, NoSchedulerStrategy),
            model_update_strategy=default("model_update", model_update_strategy, NoOpUpdateStrategy),
            data_loader_strategy=default("data_loader", data_loader_strategy, DefaultDataLoaderStrategy),
            testing_strategy=default("testing", testing_strategy, DefaultTestingStrategy),
            **options,
        )
        # The payload of the last training in another process, with the run and the batch at which it is valid.
        self._payload: tuple[tuple[str, int], dict[str, Any]] | None = None

    def obtain_model_update(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> dict[str, Any]:
        """Start a new run on `trainset`, and return the update that a client sends.

        Returns:
            A copy of the model's state, or `{"model_update": state, **payload}` if the strategy has a payload.
        """
        if self.options.max_concurrency is None:
            self.train_model(config, trainset, sampler)
        else:
            self._train_elsewhere(trainset, sampler, config)
        # A copy, because the trainer continues to train this model for the next client.
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        payload = self.update_payload
        return {"model_update": state, **payload} if payload else state

    def obtain_model_at_time(self, client_id: int, requested_time: datetime) -> dict[str, Any]:
        """Return the model of a client's newest checkpoint that was written at a time or before.

        Args:
            client_id: The client; its checkpoints are in this trainer's `checkpoint_dir`.
            requested_time: A time with its zone.

        Raises:
            CheckpointError: There is none.
            ConfigError: The time has no zone.
        """
        if requested_time.tzinfo is None:
            raise ConfigError(f"requested_time: expected a time with its zone, got {requested_time!r}")
        folder = Path(self.options.checkpoint_dir)
        before = [
            info
            for info in store.list_checkpoints(folder)
            if info.summary.get("client_id") == client_id and info.created <= requested_time
        ]
        if not before:
            raise CheckpointError(f"{folder} holds no checkpoint of client {client_id} from {requested_time} or before")
        newest = max(before, key=lambda info: info.created).path
        model: dict[str, Any] = with_base(store.load(newest), self.context.model)["model"]
        return model

    @property
    def update_payload(self) -> dict[str, Any]:
        """The payload of the update strategy; after training in a process, the payload that it had there."""
        if self._payload is not None and self._payload[0] == self._moment():
            return dict(self._payload[1])
        return self.strategies.model_update.get_update_payload(self.context)

    def _train_elsewhere(self, trainset: Any, sampler: Any, config: Mapping[str, Any] | None = None) -> float:
        seconds, payload = train_in_process(self, trainset, sampler, config)
        self._payload = (self._moment(), payload)
        return seconds

    def _moment(self) -> tuple[str, int]:
        # Further training changes one of the two, so an old payload is not returned after it.
        return self.context.run.id, self.context.progress.batches
