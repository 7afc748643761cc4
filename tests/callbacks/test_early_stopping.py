from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.callbacks import EarlyStopping, ImprovementWindow, LambdaCallback, StopWhen
from dovetail.errors import ConfigError
from dovetail.trainers.reuse import reset
from dovetail.units import Batches, Epochs

ACCURACIES = (0.1, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3)


def test_early_stopping_stops_after_its_patience(scripted: Callable[..., Any]) -> None:
    trainer = scripted(EarlyStopping(patience=2)).script(3.0, 2.0, 2.5, 2.2, 1.0)
    trainer.fit(max_length=Epochs(5))
    assert trainer.context.progress.epoch == 4
    assert trainer.context.run.stop_reason == "valid_loss has not improved 2 times in a row (best: 2 in epoch 2)"


def test_an_improvement_resets_the_patience(scripted: Callable[..., Any]) -> None:
    trainer = scripted(EarlyStopping(patience=2)).script(3.0, 3.1, 2.0, 2.1, 2.2, 1.0)
    trainer.fit(max_length=Epochs(6))
    assert trainer.context.progress.epoch == 5


def test_an_improvement_must_be_larger_than_min_delta(scripted: Callable[..., Any]) -> None:
    trainer = scripted(EarlyStopping(patience=2, min_delta=0.5)).script(3.0, 2.5, 2.6, 1.0)
    trainer.fit(max_length=Epochs(4))
    assert trainer.context.progress.epoch == 3


def test_for_an_accuracy_larger_values_are_better(scripted: Callable[..., Any]) -> None:
    trainer = scripted(EarlyStopping("valid_accuracy", patience=1)).script(0.5, 0.6, 0.55, name="accuracy")
    trainer.fit(max_length=Epochs(9))
    assert trainer.context.progress.epoch == 3


def test_nan_is_not_an_improvement_even_as_the_first_value(scripted: Callable[..., Any]) -> None:
    trainer = scripted(EarlyStopping(patience=2)).script(math.nan, math.nan, 1.0)
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.epoch == 2


def test_a_training_metric_is_checked_after_every_epoch(make: Callable[..., Any]) -> None:
    stopping = EarlyStopping("train_loss", patience=1, min_delta=100.0)
    trainer = make(stopping)
    history = trainer.fit(max_length=Epochs(9))
    assert trainer.context.progress.epoch == 2
    assert stopping.best == history.get_metric_values("train_loss")[0]


def test_a_validation_inside_an_epoch_can_stop(scripted: Callable[..., Any]) -> None:
    trainer = scripted(EarlyStopping(patience=1)).script(1.0, 2.0, 3.0)
    trainer.fit(max_length=Epochs(3), validation_period=Batches(3))
    assert trainer.context.progress.batches == 6


@pytest.mark.parametrize("num_epochs", [3, 9], ids=["length reached", "stopped"])
def test_the_best_weights_are_restored(scripted: Callable[..., Any], num_epochs: int) -> None:
    seen = []
    recorder = LambdaCallback(
        on_validation_end=lambda context, metrics: seen.append(copy.deepcopy(context.model.state_dict()))
    )
    trainer = scripted(EarlyStopping(patience=2, restore_best=True), recorder).script(3.0, 1.0, 2.0, 2.0, 2.0)
    trainer.fit(max_length=Epochs(num_epochs))
    best, last, now = seen[1], seen[-1], trainer.model.state_dict()
    assert all(torch.equal(best[name], now[name]) for name in now)
    assert not torch.equal(best["0.weight"], last["0.weight"])


def test_without_restore_best_the_last_weights_are_kept(scripted: Callable[..., Any]) -> None:
    straight = scripted().script(3.0, 1.0, 2.0)
    straight.fit(max_length=Epochs(3))
    stopped = scripted(EarlyStopping(patience=1)).script(3.0, 1.0, 2.0, 2.0)
    stopped.fit(max_length=Epochs(9))
    assert torch.equal(straight.model[0].weight, stopped.model[0].weight)


def test_the_window_rule_has_a_known_answer(scripted: Callable[..., Any]) -> None:
    trainer = scripted(ImprovementWindow(num_epochs=3, improv=0.01)).script(*ACCURACIES, name="accuracy")
    trainer.fit(max_length=Epochs(8))
    assert trainer.context.progress.epoch == 6
    assert trainer.context.run.stop_reason == "valid_accuracy has gained 0 over the last 3 values (required: 0.01)"


def test_the_gain_of_a_loss_is_its_decrease(scripted: Callable[..., Any]) -> None:
    trainer = scripted(ImprovementWindow(2, 0.5, monitor="valid_loss")).script(4.0, 3.0, 2.0, 1.6, 1.6, 1.6)
    trainer.fit(max_length=Epochs(6))
    assert trainer.context.progress.epoch == 5


def test_a_window_that_ends_in_nan_stops(scripted: Callable[..., Any]) -> None:
    trainer = scripted(ImprovementWindow(1, 0.1)).script(0.1, 0.5, math.nan, 0.9, name="accuracy")
    trainer.fit(max_length=Epochs(4))
    assert trainer.context.progress.epoch == 3


def test_stop_when_includes_the_threshold(scripted: Callable[..., Any]) -> None:
    trainer = scripted(StopWhen("valid_accuracy", 0.75)).script(0.5, 0.74, 0.75, 0.9, name="accuracy")
    trainer.fit(max_length=Epochs(4))
    assert trainer.context.progress.epoch == 3
    assert trainer.context.run.stop_reason == "valid_accuracy is 0.75 (required: 0.75)"


def test_stop_when_waits_for_a_small_loss(scripted: Callable[..., Any]) -> None:
    trainer = scripted(StopWhen("valid_loss", 0.5)).script(2.0, math.nan, 0.4, 0.1)
    trainer.fit(max_length=Epochs(4))
    assert trainer.context.progress.epoch == 3


STOPPERS: dict[str, tuple[Callable[[], Any], tuple[float, ...], str]] = {
    "early": (lambda: EarlyStopping(patience=2, restore_best=True), (3.0, 2.0, 2.5, 2.2, 1.0), "loss"),
    "window": (lambda: ImprovementWindow(3, 0.01), ACCURACIES, "accuracy"),
    "when": (lambda: StopWhen("valid_accuracy", 0.3), ACCURACIES, "accuracy"),
}


@pytest.mark.parametrize("kind", STOPPERS)
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(scripted: Callable[..., Any], kind: Any) -> None:
    make, values, name = STOPPERS[kind]
    straight = scripted(make()).script(*values, name=name)
    straight.fit(max_length=Epochs(8))
    assert straight.context.progress.epoch > 2
    first = scripted(make()).script(*values, name=name)
    first.fit(max_length=Epochs(2))
    second = scripted(make()).script(*values[2:], name=name)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second.fit(max_length=Epochs(8))
    assert second.context.progress == straight.context.progress
    assert second.context.run.stop_reason == straight.context.run.stop_reason
    assert torch.equal(second.model[0].weight, straight.model[0].weight)


@pytest.mark.parametrize("kind", STOPPERS)
def test_a_run_that_had_stopped_trains_nothing_when_resumed(scripted: Callable[..., Any], kind: Any) -> None:
    make, values, name = STOPPERS[kind]
    states = []
    # The step at which the loop writes its last checkpoint.
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    first = scripted(make(), keep).script(*values, name=name)
    first.fit(max_length=Epochs(8))
    second = scripted(make()).script()
    second.load_state_dict(states[-1])
    second.fit(max_length=Epochs(8))
    assert second.context.progress == first.context.progress
    assert second.context.run.stop_reason == first.context.run.stop_reason


@pytest.mark.parametrize("kind", STOPPERS)
def test_a_further_fit_resets_early_stopping(scripted: Callable[..., Any], kind: Any) -> None:
    make, values, name = STOPPERS[kind]
    trainer = scripted(make()).script(*values, name=name)
    trainer.fit(max_length=Epochs(8))
    stopped_after = trainer.context.progress.epoch
    trainer.script(*values, name=name).fit(max_length=Epochs(8))
    assert trainer.context.progress.epoch > stopped_after


def test_a_new_run_is_not_compared_with_the_previous_one(scripted: Callable[..., Any]) -> None:
    stopping = EarlyStopping(patience=2, restore_best=True)
    trainer = scripted(stopping).script(1.0, 5.0, 4.0, 3.0)
    trainer.fit(max_length=Epochs(1))
    reset(trainer)
    trainer.fit(max_length=Epochs(3))
    assert (trainer.context.progress.epoch, stopping.best, stopping.best_epoch) == (3, 3.0, 3)


def test_the_window_of_a_new_run_is_empty(scripted: Callable[..., Any]) -> None:
    trainer = scripted(ImprovementWindow(num_epochs=2, improv=0.01)).script(0.8, 0.9, 0.1, 0.2, name="accuracy")
    trainer.fit(max_length=Epochs(2))
    reset(trainer)
    trainer.fit(max_length=Epochs(2))
    assert trainer.context.progress.epoch == 2


def test_a_run_resumed_before_its_first_batch_keeps_the_first_validation(
    scripted: Callable[..., Any],
) -> None:
    stopping = EarlyStopping()
    trainer = scripted(stopping).script(3.0)
    trainer.context.run.validated_at = 0
    stopping.load_state_dict({"best": 2.0, "best_epoch": 0, "num_worse": 0, "weights": None})
    trainer.fit(max_length=Epochs(1))
    assert stopping.best == 2.0


def test_the_loaded_best_weights_are_a_copy(scripted: Callable[..., Any]) -> None:
    first = scripted(stopping := EarlyStopping(restore_best=True)).script(1.0)
    first.fit(max_length=Epochs(1))
    loaded = EarlyStopping(restore_best=True)
    loaded.load_state_dict(state := stopping.state_dict())
    before = state["weights"]["0.weight"].clone()
    state["weights"]["0.weight"].zero_()
    assert torch.equal(loaded.state_dict()["weights"]["0.weight"], before)


def test_early_stopping_rejects_invalid_settings() -> None:
    with pytest.raises(ConfigError, match="patience: expected a whole number that is at least 1, got 0"):
        EarlyStopping(patience=0)
    with pytest.raises(ConfigError, match="min_delta: expected a number that is not negative"):
        EarlyStopping(min_delta=-1.0)
    with pytest.raises(ConfigError, match="num_epochs: expected a whole number that is at least 1, got 0"):
        ImprovementWindow(0, 0.1)


@pytest.mark.parametrize("limit", [math.nan, math.inf, -math.inf, "0.5", True])
def test_a_limit_that_cannot_be_compared_is_an_error(limit: Any) -> None:
    with pytest.raises(ConfigError, match=f"StopWhen: threshold: expected a finite number, got {limit!r}"):
        StopWhen("valid_loss", limit)
    with pytest.raises(ConfigError, match=f"ImprovementWindow: improv: expected a finite number, got {limit!r}"):
        ImprovementWindow(3, limit)


def test_a_limit_may_be_a_numpy_or_torch_number() -> None:
    limits: list[Any] = [np.float32(0.5), torch.tensor(0.5)]
    for limit in limits:
        assert StopWhen("valid_loss", limit).threshold == 0.5
