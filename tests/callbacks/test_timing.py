from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dovetail.callbacks import Callback, MaxTime, Timer
from dovetail.callbacks.flops import StepFlops, peak_of
from dovetail.errors import ConfigError
from dovetail.tracking import FolderLogger, Tracker
from dovetail.trainers import CompiledTrainer, Trainer
from dovetail.trainers.context import TrainingContext
from dovetail.units import Batches, Epochs


class Clock:
    """Advances by one second at every reading."""

    def __init__(self) -> None:
        self.now = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_times_and_speeds_have_known_answers(make: Callable[..., Any], data: Any) -> None:
    # Readings of every epoch: its start, validation start, validation end, its end.
    trainer = make(timer := Timer(Clock()))
    trainer.fit(None, data, max_length=Epochs(2))
    assert timer.epochs == [3.0, 3.0]
    assert timer.validations == [1.0, 1.0]
    assert timer.summary() == {
        "epochs": 2,
        "epoch_seconds": 3.0,
        "validations": 2,
        "validation_seconds": 1.0,
        "training_seconds": 4.0,
        "batches_per_second": 2.5,
        "samples_per_second": 20.0,
        "tokens_per_second": 0.0,
        "flops_per_second": pytest.approx(math.nan, nan_ok=True),
        "mfu": pytest.approx(math.nan, nan_ok=True),
    }


def test_the_history_has_the_speed_of_every_epoch(make: Callable[..., Any], data: Any) -> None:
    trainer = make(Timer(Clock(), record=True))
    history = trainer.fit(None, data, max_length=Epochs(2))
    # 40 samples in 5 batches, in the two seconds besides the validation.
    assert history.get_metric_values("speed_samples_per_second") == [20.0, 20.0]
    assert history.get_metric_values("speed_batches_per_second") == [2.5, 2.5]


def test_an_unfinished_epoch_counts_only_for_the_speed(make: Callable[..., Any]) -> None:
    make(timer := Timer(Clock())).fit(max_length=Batches(7))
    assert timer.epochs == [1.0]
    assert timer.batches_per_second == 3.5


def test_measured_times_survive_a_resume(make: Callable[..., Any]) -> None:
    started = make(Timer(Clock()))
    started.fit(max_length=Batches(7))
    resumed = make(timer := Timer(Clock()))
    resumed.load_state_dict(copy.deepcopy(started.state_dict()))
    resumed.fit(max_length=Epochs(2))
    assert timer.epochs == [1.0, 1.0]
    assert timer.summary()["training_seconds"] == 3.0
    assert timer.batches_per_second == 10 / 3


class Stop(Callback):
    """Ends a run before its first batch."""

    def on_train_start(self, context: TrainingContext) -> None:
        context.stop("enough")


class Network(nn.Module):
    """A model with the operations that a counter sees, and those that draw random numbers or keep statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.conv(inputs[:, None]))).transpose(1, 2)
        outputs: Tensor = self.head(self.attention(hidden, hidden, hidden)[0].flatten(1))
        return outputs


def trained(*callbacks: Any, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    given = {"batch_size": 8, "seed": 0, "learning_rate": 0.01, "verbose": False, **settings}
    trainer = Trainer(Network(), "cpu", callbacks=callbacks, **given)
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit((inputs, (inputs.sum(dim=1) > 0).long()), max_length=Epochs(2))
    return trainer


@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}, {"num_workers": 1}])
def test_counted_flops_do_not_change_the_bits(settings: dict[str, Any]) -> None:
    plain, counted = trained(**settings), trained(timer := Timer(flops=True), **settings)
    assert counted.history == plain.history
    assert all(map(torch.equal, counted.model.state_dict().values(), plain.model.state_dict().values()))
    assert timer.flops_per_sample > 0
    assert not counted.context.callbacks.on_step_start
    assert len(list(counted.context.callbacks)) == len(list(plain.context.callbacks)) + 1


def test_the_flops_of_a_linear_model_have_a_known_answer() -> None:
    timer = Timer(Clock(), record=True, peak_flops=1000.0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 2, bias=False))
    trainer = Trainer(model, "cpu", batch_size=8, callbacks=[timer], verbose=False)
    history = trainer.fit((torch.randn(40, 5), torch.zeros(40, dtype=torch.long)), max_length=Epochs(3))
    # Forward and the gradient of the weights for both layers, the gradient of the inputs for the second one.
    expected = 2 * (2 * 5 * 7 + 3 * 7 * 2)
    assert timer.flops_per_sample == expected
    # 40 samples in one second of the clock.
    assert timer.flops_per_second == 40 * expected
    assert timer.mfu == timer.summary()["mfu"] == 40 * expected / 1000
    assert history.get_metric_values("speed_mfu") == [timer.mfu] * 3
    assert history.get_metric_values("speed_flops_per_second") == [40.0 * expected] * 3


def test_given_flops_are_used_and_a_resume_keeps_counted_ones() -> None:
    assert trained(timer := Timer(flops=500.0)).context.progress.epoch == 2
    assert timer.flops_per_sample == 500.0
    trained(counted := Timer(flops=True))
    resumed = Timer(flops=True)
    resumed.load_state_dict(counted.state_dict())
    assert resumed.flops_per_sample == counted.flops_per_sample


def test_an_error_in_the_counted_step_ends_the_counting() -> None:
    class Broken(Network):
        def forward(self, inputs: Tensor) -> Tensor:
            raise ArithmeticError

    trainer = Trainer(Broken(), "cpu", callbacks=[timer := Timer(flops=True)], verbose=False)
    with pytest.raises(ArithmeticError):
        trainer.fit((torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), max_length=Epochs(1))
    assert math.isnan(timer.flops_per_sample)
    assert is_in_torch_dispatch_mode() is False
    assert not any(isinstance(it, StepFlops) for it in trainer.context.callbacks)


def test_the_flops_of_compiled_steps_are_not_counted() -> None:
    trainer = CompiledTrainer(Trainer(Network(), "cpu", callbacks=[timer := Timer(flops=True), Stop], verbose=False))
    with pytest.warns(UserWarning, match="the FLOPs of a compiled step cannot be counted; give flops"):
        trainer.fit((torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), max_length=Epochs(1))
    assert math.isnan(timer.mfu)


@pytest.mark.parametrize("settings", [{"flops": -1.0}, {"peak_flops": True}, {"peak_flops": math.inf}])
def test_invalid_flops_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a positive number as"):
        Timer(**settings)


@pytest.mark.parametrize("timer_first", [True, False])
def test_trackers_log_the_speed_of_every_epoch(tmp_path: Path, timer_first: bool) -> None:
    timer, tracker = Timer(Clock(), record=True, flops=True, peak_flops=1e6), Tracker(FolderLogger(tmp_path))
    trainer = trained(*((timer, tracker) if timer_first else (tracker, timer)))
    (file,) = tmp_path.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for name in ("speed_samples_per_second", "speed_mfu"):
        assert [row[name] for row in rows if name in row] == trainer.history.get_metric_values(name)


def test_unmeasured_times_are_nan() -> None:
    summary = Timer().summary()
    assert math.isnan(summary["epoch_seconds"])
    assert math.isnan(summary["samples_per_second"])


def test_the_timing_callback_runs_no_hook_per_step() -> None:
    context = TrainingContext()
    context.callbacks.add(Timer)
    assert not context.callbacks.on_step_start + context.callbacks.on_step_end + context.callbacks.on_update


def test_a_run_stops_after_its_time_and_a_resume_continues_to_count(make: Callable[..., Any], tmp_path: Path) -> None:
    # Readings: one at the start, one at every batch (and so on): the fourth batch is at the fourth second.
    def build(limit: float) -> Any:
        return make(MaxTime(limit, Clock()), print_every=1, checkpoint_dir=tmp_path)

    stopped = build(4.0)
    stopped.fit(max_length=Epochs(3))
    assert (stopped.context.progress.batches, stopped.context.progress.epoch) == (4, 0)
    assert stopped.context.run.stop_reason == "max_time: 4 s of training, the limit is 4 s"

    # The time is used up: the resumed run trains nothing more.
    again = build(4.0)
    again.fit(max_length=Epochs(3), resume="auto")
    assert again.context.progress.batches == 4

    resumed, whole = build(20.0), make()
    resumed.fit(max_length=Epochs(2), resume="auto")
    whole.fit(max_length=Epochs(2))
    assert resumed.context.run.stop_reason is None
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)
    assert resumed.history.get_metric_values("train_loss") == whole.history.get_metric_values("train_loss")


def test_the_option_stops_and_the_next_fit_has_its_time_again(make: Callable[..., Any]) -> None:
    trainer = make(max_time=timedelta(microseconds=1), print_every=1)
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.batches == 1
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.batches == 2
    trainer.options.max_time = None
    trainer.fit(max_length=Epochs(3))
    assert trainer.context.progress.epoch == 3


def test_a_time_of_another_form_is_rejected(make: Callable[..., Any]) -> None:
    for wrong in ("12:00", "a:b:c", 0, -1, float("nan"), {"ours": 2}, True, [1]):
        with pytest.raises(ConfigError, match="max_time: expected a positive number of seconds"):
            make(max_time=wrong)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", math.nan),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA RTX A1000", math.nan),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("Tesla T4", 65e12),
        ("NVIDIA T400", math.nan),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", math.nan),
    ],
)
def test_the_peak_of_a_device_follows_from_whole_words_of_its_name(name: str, peak: float) -> None:
    assert peak_of(name) == pytest.approx(peak, nan_ok=True)
