from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.callbacks import EMA, LambdaCallback
from dovetail.errors import ConfigError
from dovetail.trainers.reuse import reset
from dovetail.units import Batches, Epochs


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def same(these: Any, those: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(these, those, strict=True))


def recorded(make: Callable[..., Any], ema: Any, num_epochs: int = 3) -> list[list[torch.Tensor]]:
    """Train with an EMA and return the weights at the start and after every update."""
    seen = []
    record = LambdaCallback(
        on_train_start=lambda context: seen.append([p.detach().clone() for p in context.model.parameters()]),
        on_update=lambda context: seen.append([p.detach().clone() for p in context.model.parameters()]),
    )
    make(ema, record).fit(max_length=Epochs(num_epochs))
    return seen


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("warmup", [False, True])
def test_the_ema_follows_its_formula(make: Callable[..., Any], every: Any, warmup: Any) -> None:
    ema = EMA(decay=0.9, every=every, warmup=warmup)
    start, *updates = recorded(make, ema)
    expected = start
    for number, values in enumerate(updates[every - 1 :: every]):
        decay = min(0.9, (1 + number) / (10 + number)) if warmup else 0.9
        expected = [decay * mean + (1 - decay) * value for mean, value in zip(expected, values, strict=True)]
    averages = ema.average_state_dict().values()
    assert len(updates) == 15
    for average, mean, value in zip(averages, expected, updates[-1], strict=True):
        torch.testing.assert_close(average, mean, rtol=1e-12, atol=1e-14)
        assert not torch.equal(average, value)


def test_ema_does_not_change_training_bit_for_bit(make: Callable[..., Any], data: Any) -> None:
    plain, averaged = make(), make(EMA(decay=0.5))
    for trainer in (plain, averaged):
        trainer.fit(None, data, max_length=Epochs(3), validation_period=Batches(2))
    assert same(weights(plain), weights(averaged))
    assert plain.context.history.losses == averaged.context.history.losses


def test_validation_uses_the_ema_weights(make: Callable[..., Any], data: Any) -> None:
    ema = EMA(decay=0.5)
    trainer = make(ema)
    history = trainer.fit(None, data, max_length=Epochs(2))
    trained = weights(trainer)
    ema.apply_to(trainer.model)
    assert not same(weights(trainer), trained)
    assert trainer.evaluate(data)["loss"] == history.get_latest_metric("valid_loss")


def test_validation_can_use_the_training_weights(make: Callable[..., Any], data: Any) -> None:
    trainer = make(EMA(decay=0.5, validate_with_average=False))
    history = trainer.fit(None, data, max_length=Epochs(2))
    assert trainer.evaluate(data)["loss"] == history.get_latest_metric("valid_loss")


def test_an_error_in_validation_restores_the_training_weights(make: Callable[..., Any], data: Any) -> None:
    def fail(trainer: Any, batch: Any) -> None:
        raise ZeroDivisionError

    plain, broken = make(), make(EMA(decay=0.5), test_step=fail)
    plain.fit(max_length=Epochs(1))
    with pytest.raises(ZeroDivisionError):
        broken.fit(None, data, max_length=Epochs(1))
    assert same(weights(plain), weights(broken))


def test_an_empty_validation_restores_the_training_weights(
    make: Callable[..., Any], scripted: Callable[..., Any]
) -> None:
    plain, averaged = make(), scripted(EMA(decay=0.5)).script(None, None)
    for trainer in (plain, averaged):
        trainer.fit(max_length=Epochs(2))
    assert same(weights(plain), weights(averaged))


def test_a_resumed_ema_equals_an_uninterrupted_one(make: Callable[..., Any]) -> None:
    straight, first, second = EMA(decay=0.9, warmup=True), EMA(decay=0.9, warmup=True), EMA(decay=0.9, warmup=True)
    make(straight).fit(max_length=Epochs(4))
    started = make(first)
    started.fit(max_length=Batches(7))
    resumed = make(second)
    resumed.load_state_dict(copy.deepcopy(started.state_dict()))
    resumed.fit(max_length=Epochs(4))
    assert second.num_averaged == straight.num_averaged == 20
    assert same(second.average_state_dict().values(), straight.average_state_dict().values())


def test_a_loaded_ema_is_a_copy(make: Callable[..., Any]) -> None:
    make(ema := EMA()).fit(max_length=Epochs(1))
    loaded = EMA()
    loaded.load_state_dict(state := ema.state_dict())
    before = state["averages"]["0.weight"].clone()
    state["averages"]["0.weight"].zero_()
    assert torch.equal(loaded.state_dict()["averages"]["0.weight"], before)


def test_the_returned_ema_weights_do_not_change(make: Callable[..., Any]) -> None:
    trainer = make(ema := EMA(decay=0.5))
    trainer.fit(max_length=Epochs(1))
    given = ema.average_state_dict()
    before = given["0.weight"].clone()
    trainer.fit(max_length=Epochs(2))
    assert torch.equal(given["0.weight"], before)


def test_buffers_and_frozen_parameters_are_taken_from_the_model(make: Callable[..., Any]) -> None:
    # Without a bias, whose gradient in front of a batch norm is zero up to rounding.
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    model[2].requires_grad_(False)
    trainer = make(ema := EMA(decay=0.5), model=model)
    trainer.fit(max_length=Epochs(1))
    state, average = model.state_dict(), ema.average_state_dict()
    equal = {name for name in state if torch.equal(state[name], average[name])}
    assert state.keys() - equal == {"0.weight", "1.weight", "1.bias"}


def test_tied_weights_have_one_ema(make: Callable[..., Any]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(self.first(x))

    trainer = make(ema := EMA(decay=0.5), model=Tied().double())
    trainer.fit(max_length=Epochs(1))
    average = ema.average_state_dict()
    other = Tied().double()
    ema.apply_to(other)
    assert torch.equal(average["first.weight"], average["second.weight"])
    assert torch.equal(other.first.weight, average["first.weight"])
    assert not torch.equal(trainer.model.first.weight, average["first.weight"])


def test_the_ema_of_half_precision_weights_is_in_full_precision(make: Callable[..., Any]) -> None:
    model = nn.Linear(3, 2).bfloat16()
    trainer = make(ema := EMA(), model=model)
    x, y = trainer.context.run.data["train"]
    trainer.fit((x.bfloat16(), y), (x.bfloat16(), y), max_length=Epochs(1))
    assert {average.dtype for average in ema.state_dict()["averages"].values()} == {torch.float32}
    assert {value.dtype for value in ema.average_state_dict().values()} == {torch.bfloat16}


def test_an_unfrozen_parameter_is_averaged_from_the_next_epoch(make: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    model[0].requires_grad_(False)
    unfreeze = LambdaCallback(on_epoch_end=lambda context, _: model[0].requires_grad_(True))
    trainer = make(ema := EMA(decay=0.5), unfreeze, model=model)
    trainer.fit(max_length=Epochs(1))
    assert ema.state_dict()["averages"].keys() == {"1.weight", "1.bias"}
    trainer.fit(max_length=Epochs(2))
    assert ema.state_dict()["averages"].keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_another_model_starts_a_new_ema(make: Callable[..., Any]) -> None:
    ema = EMA(decay=0.5)
    make(ema).fit(max_length=Epochs(1))
    alone = EMA(decay=0.5)
    make(alone, lr=0.01).fit(max_length=Epochs(1))
    make(ema, lr=0.01).fit(max_length=Epochs(1))
    assert same(ema.average_state_dict().values(), alone.average_state_dict().values())


def test_a_new_run_of_the_same_model_starts_a_new_ema(make: Callable[..., Any]) -> None:
    trainer = make(ema := EMA(decay=1.0))
    trainer.fit(max_length=Epochs(1))
    reset(trainer)
    start = weights(trainer)
    trainer.fit(max_length=Epochs(1))
    assert same(ema.average_state_dict().values(), start)
    assert ema.num_averaged == 5


def test_an_ema_without_updates_warns(make: Callable[..., Any]) -> None:
    sentence = "EMA: the average is still the initial weights: every is 6, and the run made 5 updates"
    with pytest.warns(UserWarning, match=sentence):
        make(EMA(every=6)).fit(max_length=Epochs(1))
    make(EMA(every=5)).fit(max_length=Epochs(1))


def test_an_ema_of_a_stopped_run_does_not_warn(make: Callable[..., Any]) -> None:
    stop = LambdaCallback(on_step_end=lambda context, output: context.stop("enough"))
    make(EMA(every=5), stop).fit(max_length=Epochs(1))


def test_an_ema_of_another_shape_is_rejected(make: Callable[..., Any]) -> None:
    make(ema := EMA()).fit(max_length=Epochs(1))
    loaded = EMA()
    loaded.load_state_dict(ema.state_dict())
    with pytest.raises(ConfigError, match=r"'0.weight' has the shape \(5, 3\), the parameter \(2, 3\)"):
        make(loaded, model=nn.Sequential(nn.Linear(3, 2)).double()).fit(max_length=Epochs(1))


def test_ema_rejects_invalid_settings() -> None:
    with pytest.raises(ConfigError, match=r"decay: expected a number from 0 to 1, got 1\.5"):
        EMA(decay=1.5)
    with pytest.raises(ConfigError, match="every: expected a whole number that is at least 1, got 0"):
        EMA(every=0)
    with pytest.raises(ConfigError, match="there is no average yet"):
        EMA().average_state_dict()
