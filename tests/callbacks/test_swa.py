from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from dovetail.callbacks import SWA
from dovetail.errors import ConfigError
from dovetail.units import Epochs, Updates


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_swa_equals_a_loop_with_the_classes_of_torch(make: Callable[..., Any], data: Any, strategy: Any) -> None:
    swa, model = SWA(start=0.5, lr=0.02, anneal=2, anneal_strategy=strategy), normalized()
    batches = list(zip(data[0].split(8), data[1].split(8), strict=True))
    trainer = make(swa, model=model, lr=0.1)
    history = trainer.fit(batches, batches, max_length=Epochs(8))

    theirs = normalized()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    averaged, schedule = AveragedModel(theirs), SWALR(optimizer, 0.02, anneal_epochs=2, anneal_strategy=strategy)
    losses, rates = [], []
    for epoch in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(theirs(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        if epoch >= 4:
            averaged.update_parameters(theirs)
            schedule.step()
    update_bn(batches, averaged)

    assert swa.num_averaged == 4
    assert list(history.losses) == pytest.approx(losses, rel=1e-12)
    assert history.get_metric_values("train_lr") == pytest.approx(rates, rel=1e-12)
    for ours, expected in zip(model.state_dict().values(), averaged.module.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert model[1].momentum == 0.1  # type: ignore[index]


@pytest.mark.parametrize("first", [2, 5])
def test_swa_resumes_exactly_and_a_later_fit_continues_from_the_training_weights(
    make: Callable[..., Any], first: int
) -> None:
    def build() -> Any:
        return make(SWA(start=Epochs(3), lr=0.02), model=normalized())

    whole, started, resumed = build(), build(), build()
    whole.fit(max_length=Epochs(7))
    with pytest.warns(UserWarning, match="no weights were averaged") if first == 2 else nullcontext():
        started.fit(max_length=Epochs(first))
    state = copy.deepcopy(started.state_dict())
    started.fit(max_length=Epochs(7))
    resumed.load_state_dict(state)
    resumed.fit(max_length=Epochs(7))
    for other in (started, resumed):
        assert list(other.history.losses) == list(whole.history.losses)
        for ours, expected in zip(other.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
            assert torch.equal(ours, expected)


def test_updates_may_be_averaged(make: Callable[..., Any]) -> None:
    make(swa := SWA(start=0.5, every=Updates(2))).fit(max_length=Updates(20))
    assert swa.num_averaged == 5
    with pytest.raises(ConfigError, match="have different units; give both in Epochs or both in Updates"):
        make(SWA(start=0.5, every=Updates(2))).fit(max_length=Epochs(2))


def test_wrong_settings_are_rejected() -> None:
    for wrong in ({"start": 1.5}, {"lr": 0}, {"every": 3}, {"anneal": -1}, {"anneal_strategy": "sin"}):
        with pytest.raises(ConfigError, match=f"SWA: {next(iter(wrong))}: expected"):
            SWA(**wrong)
