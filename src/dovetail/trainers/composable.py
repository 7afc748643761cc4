"""A trainer made of strategies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from dovetail.trainers.basic import Trainer
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


class ComposableTrainer(Trainer):
    """A trainer whose every concern is a strategy that can be replaced alone.

    What is not given has a default: cross entropy, SGD, a plain step, a constant rate, no update rule, data in its own
    order, accuracy. A strategy may be an instance, a class, a plain callable or torch object (`F.cross_entropy`,
    `partial(AdamW, lr=1e-3)`), or a name (`"AdamW"`); steps and updates may be lists, which are composed.

    Strategies are set up when the trainer is made, hear `on_train_start` in every run, and are torn down once: by
    `close()`, at the end of a `with` block, or when the trainer is no more.

    Args:
        model: A module, or a class or function that makes one.
        callbacks: Callbacks, as instances or classes.
        loss_strategy: What the loss is.
        optimizer_strategy: Which optimizer moves the parameters.
        training_step_strategy: How one batch is computed.
        lr_scheduler_strategy: How the learning rate moves.
        model_update_strategy: What happens around updates, and what a client sends besides its weights.
        data_loader_strategy: How a training set becomes batches.
        testing_strategy: How a model is judged by `test`.
        options: The other arguments and options of `basic.Trainer`.

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
        super().__init__(
            model,
            callbacks=callbacks,
            loss_strategy=_given(loss_strategy, DefaultLossCriterionStrategy),
            optimizer_strategy=_given(optimizer_strategy, DefaultOptimizerStrategy),
            training_step_strategy=_given(training_step_strategy, DefaultTrainingStepStrategy),
            lr_scheduler_strategy=_given(lr_scheduler_strategy, NoSchedulerStrategy),
            model_update_strategy=_given(model_update_strategy, NoOpUpdateStrategy),
            data_loader_strategy=_given(data_loader_strategy, DefaultDataLoaderStrategy),
            testing_strategy=_given(testing_strategy, DefaultTestingStrategy),
            **options,
        )
        self._closing = weakref.finalize(self, self.strategies.teardown, self.context)

    def obtain_model_update(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> dict[str, Any]:
        """Train anew on `trainset`, and return what a client sends.

        Returns:
            A copy of the model's state, or `{"model_update": state, **payload}` where the strategy has a payload.
        """
        self.train_model(config, trainset, sampler)
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        update = self.strategies.model_update
        payload = update.get_update_payload(self.context) if update is not None else {}
        return {"model_update": state, **payload} if payload else state

    def close(self) -> None:
        """Tear the strategies down, now and only now."""
        self._closing()

    def __enter__(self) -> ComposableTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _given(strategy: Any, default: Callable[[], Any]) -> Any:
    return default() if strategy is None else strategy
