"""Several validation sets by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problem import Problem, assert_same_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dovetail import Epochs, Trainer
from dovetail.callbacks import EarlyStopping
from dovetail.data.named_sets import named_sets
from dovetail.errors import DataError, UnknownNameError
from dovetail.trainers.strategies import ReduceLROnPlateauSchedulerStrategy


def build(model: nn.Module, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, "cpu", optimizer=optimizer, verbose=False, batch_size=8, seed=1, **options)


def sets(problem: Problem) -> dict[str, Any]:
    noisy = problem.x + 0.5
    return {
        "clean": (problem.x[:40], problem.y[:40]),
        "noisy": DataLoader(TensorDataset(noisy, problem.y), 16, shuffle=True),
    }


def test_every_set_is_measured_as_if_it_were_alone(problem: Problem) -> None:
    given, model = sets(problem), problem.model()
    trainer = build(model)
    history = trainer.fit((problem.x, problem.y), given, max_length=Epochs(2))
    for name, data in given.items():
        alone = trainer.evaluate(data)
        assert history.get_metric_values(f"valid_{name}_loss")[-1] == pytest.approx(alone["loss"], rel=1e-6)
        assert history.get_metric_values(f"valid_{name}_accuracy")[-1] == alone["accuracy"]
    assert trainer.evaluate(given).keys() == {"clean_loss", "clean_accuracy", "noisy_loss", "noisy_accuracy"}
    # Validation changes nothing in training.
    other = problem.model()
    build(other).fit((problem.x, problem.y), max_length=Epochs(2))
    assert_same_weights(model, other)


def test_callbacks_schedules_and_the_best_checkpoint_use_a_set_by_name(problem: Problem, tmp_path: Path) -> None:
    plateau = ReduceLROnPlateauSchedulerStrategy(monitor="valid_noisy_loss", patience=0, threshold=10.0)
    trainer = build(
        problem.model(),
        lr_scheduler_strategy=plateau,
        callbacks=[EarlyStopping("valid_clean_loss", patience=1, min_delta=10.0)],
        checkpoint_dir=tmp_path,
        best_metric="valid_noisy_accuracy",
        save_best=True,
    )
    trainer.fit((problem.x, problem.y), sets(problem), max_length=Epochs(5))
    assert trainer.context.progress.epoch == 2
    assert "valid_clean_loss has not improved" in str(trainer.context.run.stop_reason)
    assert trainer.context.optimizers[0].param_groups[0]["lr"] < 0.1
    saver = trainer.context.run.saver
    assert saver is not None
    assert saver.best == max(trainer.history.get_metric_values("valid_noisy_accuracy"))


def test_a_set_that_is_not_measured_is_reported_before_training(problem: Problem) -> None:
    trainer = build(problem.model(), callbacks=[EarlyStopping("valid_loss")])
    with pytest.raises(UnknownNameError, match="valid_clean_loss"):
        trainer.fit((problem.x, problem.y), sets(problem))
    assert trainer.context.progress.batches == 0


def test_a_resumed_run_reads_the_same_validation_batches(problem: Problem) -> None:
    def noisy() -> dict[str, Any]:
        # A generator draws which 80 samples are measured.
        drawn = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(problem.x, problem.y), 40, shuffle=True, drop_last=True, generator=drawn)
        return {"all": (problem.x, problem.y), "drawn": loader}

    whole = build(problem.model())
    whole.fit((problem.x, problem.y), noisy(), max_length=Epochs(4))
    started, resumed = build(problem.model()), build(problem.model())
    started.fit((problem.x, problem.y), noisy(), max_length=Epochs(2))
    resumed.load_state_dict(copy.deepcopy(started.state_dict()))
    history = resumed.fit((problem.x, problem.y), noisy(), max_length=Epochs(4))
    for name in ("valid_all_loss", "valid_drawn_loss"):
        assert history.get_metric_values(name) == whole.history.get_metric_values(name)


def test_the_dry_run_and_explain_accept_several_sets(problem: Problem) -> None:
    trainer = build(problem.model(), train_dataset=(problem.x, problem.y), val_dataset=sets(problem))
    history = trainer.fit(dry_run=True)
    assert "valid_noisy_loss" in history.get_metric_names()
    assert "validation" in trainer.explain()


def test_the_values_of_a_mapping_decide() -> None:
    array, tensor = np.zeros((2, 1)), torch.zeros(2, 1)
    for one in ({"x": tensor, "y": array}, {"x": [1, 2]}, {}, (tensor, tensor), None):
        assert named_sets(one) is None
    for several in ({"a": (tensor, tensor)}, {"a": TensorDataset(tensor)}, {"a": [tensor]}, {"a": {"x": tensor}}):
        assert named_sets(several) is several
    with pytest.raises(DataError, match="got both: 'a': Tensor, 'b': list"):
        named_sets({"a": tensor, "b": [tensor]})
    with pytest.raises(DataError, match="expected names of data sets"):
        named_sets({1: [tensor]})
