"""Passes over some of the batches: `limit_train_batches`, `limit_val_batches` and `overfit_batches`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dovetail import Batches, Epochs, Trainer
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError, DataError
from dovetail.trainers.context import TrainingContext


def build(model: nn.Module, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, "cpu", optimizer=optimizer, verbose=False, batch_size=8, **options)


class Rows(Dataset[Any]):
    """Samples that workers read."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return self.problem.x[index], self.problem.y[index]


@pytest.mark.parametrize("limit", [5, 5 / 12 + 0.01])
def test_a_limited_epoch_equals_a_loop_over_its_first_batches(problem: Problem, limit: float) -> None:
    ours, theirs = problem.model(), problem.model()
    trainer = build(ours, limit_train_batches=limit, limit_val_batches=2)
    history = trainer.fit(problem.batches, problem.batches, max_length=Epochs(3))
    expected = train_by_hand(theirs, problem.batches[:5], torch.optim.SGD(theirs.parameters(), lr=0.1), epochs=3)
    assert list(history.losses) == expected
    assert_same_weights(ours, theirs)
    assert trainer.context.progress.batches == 15
    # Only a validation is limited.
    assert history.get_metric_values("valid_loss")[-1] == trainer.evaluate(problem.batches[:2])["loss"]


class StopAt(Callback):
    """Ends a run after a number of batches."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_step_end(self, context: TrainingContext, output: Any) -> None:
        if context.progress.batches == self.batches:
            context.stop("the test")


@pytest.mark.parametrize("stop", [5, 8])
@pytest.mark.parametrize("kind", ["tensors", "shuffled loader", "workers"])
def test_a_limited_run_resumes_exactly(problem: Problem, tmp_path: Path, kind: str, stop: int) -> None:
    def run(folder: str, *callbacks: Callback) -> Trainer:
        torch.manual_seed(7)
        data = {
            "tensors": (problem.x, problem.y),
            "shuffled loader": DataLoader(TensorDataset(problem.x, problem.y), 8, shuffle=True),
            "workers": DataLoader(Rows(problem), 8, shuffle=True, num_workers=1),
        }[kind]
        trainer = build(
            problem.model(dropout=0.2),
            seed=3,
            limit_train_batches=5,
            lr_scheduler="cosine",
            callbacks=callbacks,
            checkpoint_dir=tmp_path / folder,
        )
        trainer.fit(data, max_length=Epochs(3), resume="auto")
        return trainer

    whole = run("whole")
    # The first epoch ends after 5 batches; 8 are in the middle of the second one.
    assert run("resumed", StopAt(stop)).context.progress.batches == stop
    resumed = run("resumed")
    assert list(resumed.history.losses) == list(whole.history.losses)
    assert len(whole.history.losses) == 15
    assert_same_weights(resumed.model, whole.model)
    # The cosine ends with the limited run, not with the data.
    assert whole.optimizer is not None
    assert whole.optimizer.param_groups[0]["lr"] < 0.01


@pytest.mark.parametrize("is_loader", [False, True])
def test_overfit_batches_trains_and_validates_the_same_batches(problem: Problem, is_loader: bool) -> None:
    ours, theirs = problem.model(), problem.model()
    data: Any = DataLoader(TensorDataset(problem.x, problem.y), 8) if is_loader else (problem.x, problem.y)
    trainer = build(ours, overfit_batches=3)
    # The given validation data is not read.
    history = trainer.fit(data, (problem.x[90:], problem.y[90:]), max_length=Epochs(2), validation_period=Batches(2))
    expected = train_by_hand(theirs, problem.batches[:3], torch.optim.SGD(theirs.parameters(), lr=0.1), epochs=2)
    assert list(history.losses) == expected
    assert_same_weights(ours, theirs)
    plain = build(theirs).evaluate(problem.batches[:3])
    assert history.get_metric_values("valid_loss")[-1] == plain["loss"]
    trainer.options.overfit_batches = 0
    assert trainer.num_batches("train") == 12


def test_accumulation_closes_its_window_at_the_limit(problem: Problem) -> None:
    trainer = build(problem.model(), limit_train_batches=5, accumulation_steps=2)
    trainer.fit(iter(problem.batches), max_length=Epochs(1))
    assert (trainer.context.progress.batches, trainer.context.progress.updates) == (5, 3)


def test_limits_that_cannot_be_used_are_rejected(problem: Problem) -> None:
    for wrong in (0, 1.5, -1, True, "0.1"):
        with pytest.raises(ConfigError, match="limit_val_batches: expected a whole number of batches, or a part"):
            build(problem.model(), limit_val_batches=wrong)
    with pytest.raises(DataError, match="needs data with a length"):
        build(problem.model(), limit_train_batches=0.5).fit(iter(problem.batches), max_length=Epochs(1))
    shuffled = DataLoader(TensorDataset(problem.x, problem.y), 8, shuffle=True)
    with pytest.raises(DataError, match="overfit_batches: the loader shuffles"):
        build(problem.model(), overfit_batches=1).fit(shuffled)
