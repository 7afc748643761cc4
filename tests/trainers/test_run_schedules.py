"""Schedules over the length of a run: their values, the lengths they follow, and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import IterableDataset

from dovetail import Batches, Epochs, Records, Updates
from dovetail.callbacks import Callback, LRMonitor
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.schedules import RunSchedule
from dovetail.units import TrainUnit

DATA = torch.linspace(-1, 1, 64 * 4).reshape(64, 4), torch.arange(64) % 2
EIGHT_UPDATES: dict[str, Any] = {
    "learning_rate": 1.0,
    "batch_size": 8,
    "optim_function": "SGD",
    "verbose": False,
    "seed": 0,
}


def make(**options: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(nn.Linear(4, 2), "cpu", callbacks=[LRMonitor(Updates(1))], **{**EIGHT_UPDATES, **options})


def rates(trainer: Trainer, length: TrainUnit, data: Any = DATA, **arguments: Any) -> list[float]:
    """Return the rates of all updates, and the one after the last."""
    return trainer.fit(data, max_length=length, **arguments).get_metric_values("lr_group0")


def wsd_of_transformers(optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int) -> LambdaLR:
    from transformers import get_wsd_schedule

    scheduler: LambdaLR = get_wsd_schedule(
        optimizer, num_warmup_steps, 4, num_training_steps, warmup_type="linear", decay_type="linear"
    )
    return scheduler


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("shape", ["cosine", "linear", "inverse_sqrt", "wsd", "constant"])
def test_rates_equal_those_of_transformers(shape: str, warmup: int) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    theirs: dict[str, Callable[..., LambdaLR]] = {
        "cosine": partial(optimization.get_cosine_schedule_with_warmup, num_training_steps=16),
        "linear": partial(optimization.get_linear_schedule_with_warmup, num_training_steps=16),
        "inverse_sqrt": optimization.get_inverse_sqrt_schedule,
        "wsd": partial(wsd_of_transformers, num_training_steps=16),
        "constant": optimization.get_constant_schedule_with_warmup,
    }
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = theirs[shape](optimizer, num_warmup_steps=warmup)
    expected = []
    for _ in range(17):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    ours = rates(make(lr_scheduler=RunSchedule(shape, warmup, decay=4)), Epochs(2))

    assert ours == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("length", [Epochs(2), Batches(16), Updates(16), Records(128)])
def test_every_unit_of_length_gives_the_same_schedule(length: TrainUnit) -> None:
    assert rates(make(lr_scheduler="cosine", warmup=0.25), length) == rates(
        make(lr_scheduler=RunSchedule("cosine", Updates(4))), Epochs(2)
    )


def test_a_warmup_of_an_epoch_counts_its_updates() -> None:
    assert rates(make(warmup=Epochs(1)), Epochs(2)) == [*(n / 8 for n in range(8)), *[1.0] * 9]


def test_updates_are_counted_with_accumulation() -> None:
    # Windows of 3, 3 and 2 batches: a window never spans two epochs.
    found = rates(make(lr_scheduler="linear", accumulation_steps=3), Epochs(2))
    assert found == pytest.approx([1 - n / 6 for n in range(7)])


def test_a_resumed_run_has_the_rates_and_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = {"lr_scheduler": "cosine", "warmup": 0.25, "optim_function": "Adam"}
    whole = make(**settings)
    whole_rates = rates(whole, Epochs(3))
    saved = {**settings, "checkpoint_dir": tmp_path}
    interrupted = make(**saved)
    # The stop comes from a callback, so that the planned length covers the whole run.
    interrupted.context.callbacks.add(StopAt(11))
    rates(interrupted, Epochs(3))
    resumed = make(**saved)

    assert rates(resumed, Epochs(3), resume="auto") == whole_rates
    for ours, expected in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_a_longer_second_run_uses_its_own_length() -> None:
    trainer = make(lr_scheduler="linear")
    rates(trainer, Epochs(1))
    found = rates(trainer, Epochs(2))
    assert found[9:] == pytest.approx([1 - n / 16 for n in range(9, 17)])


def test_one_name_schedules_every_optimizer_and_group() -> None:
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    first = SGD([{"params": [model[0].weight], "lr": 0.5}, {"params": [model[0].bias], "lr": 0.1}])
    second = SGD(model[1].parameters(), lr=0.2)

    def step(trainer: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        for layer, optimizer in zip(model, (first, second), strict=True):
            loss = nn.functional.cross_entropy(layer(batch[0]), batch[1])
            trainer.context.backward(loss)
            trainer.context.step(optimizer)
        return {"loss": loss.detach()}

    options = {name: value for name, value in EIGHT_UPDATES.items() if name not in ("learning_rate", "optim_function")}
    trainer = Trainer(
        model, "cpu", optimizer=[first, second], lr_scheduler="linear", train_step=step, **options, print_every=100
    )
    trainer.context.callbacks.add(StopAt(4))
    trainer.fit(DATA, max_length=Epochs(1))

    groups = [*first.param_groups, *second.param_groups]
    assert [group["lr"] for group in groups] == pytest.approx([0.25, 0.05, 0.1])


def test_a_strategy_by_name_has_the_same_rates() -> None:
    trainer = ComposableTrainer(
        nn.Linear(4, 2),
        callbacks=[LRMonitor(Updates(1))],
        lr_scheduler_strategy="cosine",
        optimizer_strategy=partial(SGD, lr=1.0),
        batch_size=8,
        verbose=False,
    )
    assert rates(trainer, Epochs(2)) == rates(make(lr_scheduler="cosine"), Epochs(2))


def test_explain_shows_the_rates_of_the_next_epoch() -> None:
    trainer = make(lr_scheduler="linear", train_dataset=DATA, num_epochs=2)
    assert "learning rate 1 → 0.5" in trainer.explain()


class StopAt(Callback):
    """Requests a stop after a number of updates."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_update(self, context: Any) -> None:
        if context.progress.updates == self.update:
            context.stop("enough")


class Stream(IterableDataset[Any]):
    """The samples of DATA without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*DATA, strict=True))


def test_data_without_a_length_needs_a_length_in_updates() -> None:
    with pytest.raises(ConfigError, match=r"'cosine' needs the number of updates.*max_length is Epochs\(1\)"):
        rates(make(lr_scheduler="cosine"), Epochs(1), Stream())
    assert rates(make(lr_scheduler="linear"), Updates(4), Stream()) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(make(warmup=2), Epochs(1), Stream())[:3] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 1.5}, "warmup: expected a part of the run below 1.0"),
        ({"warmup": -1}, "warmup: expected a part of the run"),
        ({"warmup": "5%"}, "warmup: expected a part of the run"),
        ({"warmup": Records(5)}, r"warmup: expected Updates\(n\) or Epochs\(n\)"),
        ({"warmup": 0.1, "lr_scheduler": "StepLR"}, "warmup: expected lr_scheduler='cosine'"),
        ({"warmup": 0.1, "lr_scheduler": RunSchedule("linear")}, "has its own; give one or the other"),
        ({"warmup": 0.1, "lr_scheduler_strategy": "StepLRSchedulerStrategy"}, "warmup: .* decides this"),
    ],
)
def test_a_meaningless_warmup_raises(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_an_unknown_shape_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'cosine'"):
        rates(make(lr_scheduler="cosin"), Epochs(1))
    with pytest.raises(UnknownNameError, match="'linear'"):
        RunSchedule("linaer")
    with pytest.raises(ConfigError, match="final: expected a number from 0 to 1"):
        RunSchedule(final=2)


def test_a_callable_that_schedules_another_optimizer_raises() -> None:
    other = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="returned a StepLR of another one"):
        rates(make(lr_scheduler=lambda optimizer: StepLR(other, 1)), Epochs(1))


def test_a_function_of_the_step_count_names_lambda_lr() -> None:
    with pytest.raises(TypeError) as caught:
        rates(make(lr_scheduler=lambda step: 0.1**step), Epochs(1))
    assert any("partial(LambdaLR, lr_lambda=…)" in note for note in getattr(caught.value, "__notes__", [""]))


def test_a_schedule_inside_another_scheduler_raises() -> None:
    inner = RunSchedule("cosine")
    scheduler = inner(SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    with pytest.raises(ConfigError, match="needs the length of the run"):
        scheduler.step()
