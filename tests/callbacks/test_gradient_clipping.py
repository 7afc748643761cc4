from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from dovetail.callbacks import GradientClipping
from dovetail.errors import ConfigError
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import reset
from dovetail.units import Batches, Epochs


def by_hand(trainer: Any, clip: Any, num_epochs: int = 2, accumulate: Any = 1) -> list[Any]:
    """A hand-written loop over the trainer's own model, optimizer and batches."""
    model, optimizer, sizes = trainer.model, trainer.optimizer, []
    x, y = trainer.context.run.data["train"]
    for _ in range(num_epochs):
        for inputs, targets in zip(x.split(8 * accumulate), y.split(8 * accumulate), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            sizes.append(clip(model.parameters()))
            optimizer.step()
    return sizes


CLIPS = {
    "norm": ({"max_norm": 0.2}, lambda p: nn.utils.clip_grad_norm_(p, 0.2)),
    "largest": ({"max_norm": 0.1, "norm_type": math.inf}, lambda p: nn.utils.clip_grad_norm_(p, 0.1, math.inf)),
    "value": ({"max_value": 0.05}, lambda p: nn.utils.clip_grad_value_(p, 0.05)),
}


@pytest.mark.parametrize("kind", CLIPS)
@pytest.mark.parametrize("log", [False, True])
def test_clipping_equals_a_hand_written_loop(make: Callable[..., Any], kind: Any, log: Any) -> None:
    settings, clip = CLIPS[kind]
    trainer, reference, free = make(GradientClipping(**settings, log=log)), make(), make()
    trainer.fit(max_length=Epochs(2))
    free.fit(max_length=Epochs(2))
    by_hand(reference, clip)
    assert torch.equal(trainer.model[0].weight, reference.model[0].weight)
    assert not torch.equal(trainer.model[0].weight, free.model[0].weight)


def test_clipping_sees_the_gradients_of_a_whole_window(make: Callable[..., Any]) -> None:
    trainer, reference = make(GradientClipping(max_norm=0.2), accumulation_steps=5), make()
    trainer.fit(max_length=Epochs(2))
    by_hand(reference, CLIPS["norm"][1], accumulate=5)
    torch.testing.assert_close(trainer.model[0].weight, reference.model[0].weight, rtol=1e-12, atol=1e-14)


def test_every_optimizer_is_clipped_separately(make: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    norms = []

    class Watching(GradientClipping):
        def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
            super().on_gradients(context, optimizer)
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            norms.append(float(nn.utils.get_total_norm(gradients)))

    trainer = make(Watching(max_norm=1e-3, log=True), model=model, optimizer=optimizers)
    history = trainer.fit(max_length=Epochs(1))
    assert norms == pytest.approx([1e-3] * 10, rel=1e-2)
    (row,) = (row for row in history if row["stage"] == "gradients")
    assert (row["clipped"], row["clipped_1"]) == (1.0, 1.0)
    assert row["size"] != row["size_1"]


def test_the_log_has_the_mean_norm_and_the_share_of_clipped_steps(make: Callable[..., Any]) -> None:
    history = make(GradientClipping(max_norm=0.45, log=True)).fit(max_length=Epochs(2))
    sizes = [float(size) for size in by_hand(make(), lambda p: nn.utils.clip_grad_norm_(p, 0.45))]
    rows = [row for row in history if row["stage"] == "gradients"]
    assert [row["epoch"] for row in rows] == [1, 2]
    for row, part in zip(rows, (sizes[:5], sizes[5:]), strict=True):
        assert row["size"] == pytest.approx(sum(part) / 5)
        assert row["clipped"] == sum(size > 0.45 for size in part) / 5
    assert 0 < sum(row["clipped"] for row in rows) < 2


def test_without_log_no_norm_is_recorded(make: Callable[..., Any]) -> None:
    history = make(GradientClipping(max_norm=0.2)).fit(max_length=Epochs(1))
    assert {row["stage"] for row in history} == {"train"}


def test_a_clipping_log_resumed_within_an_epoch_equals_an_uninterrupted_one(make: Callable[..., Any]) -> None:
    straight = make(GradientClipping(max_norm=0.3, log=True)).fit(max_length=Epochs(1))
    started = make(GradientClipping(max_norm=0.3, log=True))
    started.fit(max_length=Batches(3))
    resumed = make(GradientClipping(max_norm=0.3, log=True))
    resumed.load_state_dict(copy.deepcopy(started.state_dict()))
    history = resumed.fit(max_length=Epochs(1))
    assert history.get_latest_metric("gradients_size") == straight.get_latest_metric("gradients_size")
    assert history.get_latest_metric("gradients_clipped") == straight.get_latest_metric("gradients_clipped")


def test_the_log_of_a_new_run_excludes_the_interrupted_epoch(make: Callable[..., Any]) -> None:
    trainer = make(GradientClipping(max_norm=0.3, log=True))
    trainer.fit(max_length=Batches(3))
    reset(trainer)
    trainer.fit(max_length=Batches(1))
    state = trainer.state_dict()["callbacks"]
    (tally,) = next(entry["state"]["tallies"] for entry in state if entry["name"] == "GradientClipping").values()
    assert tally[2] == 1


@pytest.mark.parametrize("limits", [{}, {"max_norm": 1.0, "max_value": 1.0}])
def test_exactly_one_positive_limit_is_accepted(limits: Any) -> None:
    with pytest.raises(ConfigError, match="exactly one positive limit, max_norm or max_value"):
        GradientClipping(**limits)


@pytest.mark.parametrize("limits", [{"max_norm": 0.0}, {"max_value": -1.0}])
def test_the_clipping_limit_must_be_positive(limits: Any) -> None:
    (name,) = limits
    with pytest.raises(ConfigError, match=f"{name}: expected a number above 0"):
        GradientClipping(**limits)


def test_a_norm_type_with_max_value_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"norm_type: expected with max_norm only, got norm_type=inf and max_value=0\.5"
    ):
        GradientClipping(max_value=0.5, norm_type=math.inf)
