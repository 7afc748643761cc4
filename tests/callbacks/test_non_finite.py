from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail.callbacks import LambdaCallback, NonFiniteLoss, Report
from dovetail.errors import ConfigError, NonFiniteLossError
from dovetail.trainers.context import TrainingContext
from dovetail.units import Epochs


def breaks_at(*numbers: Any, value: Any = math.nan) -> Callable[[Any, Any], dict[str, Any]]:
    """A train_step whose loss is not finite at the given batches, counted from 1 over all epochs."""

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = trainer.criterion(trainer.model(batch[0]), batch[1])
        if trainer.context.progress.batches + 1 in numbers:
            loss = loss * 0 + value
        return {"loss": loss}

    return train_step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("print_every", [1, 2, 10])
def test_the_non_finite_callback_names_the_batch_and_the_value(
    make: Callable[..., Any], value: Any, print_every: int
) -> None:
    trainer = make(nonfinite="ignore", train_step=breaks_at(8, 9, value=value), print_every=print_every)
    trainer.context.callbacks.add(NonFiniteLoss())
    with pytest.raises(
        NonFiniteLossError, match=rf"the loss of batch 8 is {value} \(batch 3 of epoch 2\): try a lower"
    ):
        trainer.fit(max_length=Epochs(3))


def test_the_non_finite_callback_can_stop_training_cleanly(make: Callable[..., Any]) -> None:
    ended: list[Any] = []
    trainer = make(
        NonFiniteLoss("stop"),
        LambdaCallback(on_train_end=ended.append),
        nonfinite="ignore",
        train_step=breaks_at(3),
        print_every=1,
    )
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.batches == 3
    assert trainer.context.run.stop_reason.startswith("the loss of batch 3 is nan")
    assert len(ended) == 1


def test_the_non_finite_callback_can_warn_once_and_continue(make: Callable[..., Any]) -> None:
    trainer = make(NonFiniteLoss("warn"), nonfinite="ignore", train_step=breaks_at(2, 7), print_every=1)
    with pytest.warns(RuntimeWarning, match="the loss of batch 2 is nan") as caught:
        trainer.fit(max_length=Epochs(3))
    assert len(caught) == 1
    assert trainer.context.progress.epoch == 3


def test_finite_losses_whose_sum_overflows_are_finite() -> None:
    context = TrainingContext()
    NonFiniteLoss().on_report(context, Report({}, [1e308, 1e308], 0))
    with pytest.raises(NonFiniteLossError, match="batch 3 is inf"):
        NonFiniteLoss().on_report(context, Report({}, [1e308, 1e308, math.inf], 0))


def test_the_non_finite_callback_does_not_change_weights(make: Callable[..., Any]) -> None:
    plain, watched = make(nonfinite="ignore"), make(NonFiniteLoss(), nonfinite="ignore")
    for trainer in (plain, watched):
        trainer.fit(max_length=Epochs(2))
    assert torch.equal(plain.model[0].weight, watched.model[0].weight)


def test_an_unknown_action_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected 'raise', 'stop' or 'warn', got 'ignore'"):
        NonFiniteLoss("ignore")  # type: ignore[arg-type]
