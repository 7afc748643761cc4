from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.callbacks import EarlyStopping, ReduceOnPlateau, StopWhen, mode_of
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.units import Epochs


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("valid_loss", "min"),
        ("train_mse", "min"),
        ("valid_top5_error", "min"),
        ("valid_accuracy", "max"),
        ("valid_acc", "max"),
        ("valid_macro_f1", "max"),
    ],
)
def test_the_mode_is_derived_from_the_metric_name(name: str, mode: Any) -> None:
    assert mode_of(name) == mode


@pytest.mark.parametrize("name", ["valid_energy", "valid_loss_accuracy"])
def test_an_ambiguous_metric_name_requires_a_mode(name: str) -> None:
    with pytest.raises(ConfigError, match="give mode='min' or mode='max'"):
        EarlyStopping(name)
    assert EarlyStopping(name, mode="max").mode == "max"


def test_an_invalid_mode_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected 'min', 'max' or None, got 'up'"):
        StopWhen("valid_loss", 0.1, mode="up")  # type: ignore[arg-type]


def test_a_missing_validation_metric_suggests_the_nearest(scripted: Callable[..., Any]) -> None:
    trainer = scripted(EarlyStopping("valid_accurcy", mode="max")).script({"loss": 1.0, "accuracy": 0.5})
    with pytest.raises(UnknownNameError, match="'valid_accurcy': did you mean 'valid_accuracy'") as caught:
        trainer.fit(max_length=Epochs(1))
    assert "EarlyStopping" in str(caught.value)


def test_a_missing_training_metric_suggests_the_nearest(make: Callable[..., Any]) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'train_loss'"):
        make(ReduceOnPlateau("train_los", mode="min")).fit(max_length=Epochs(1))


def test_a_validation_metric_without_validation_is_an_error_before_training(make: Callable[..., Any]) -> None:
    trainer = make(EarlyStopping())
    with pytest.raises(ConfigError, match="EarlyStopping monitors 'valid_loss', but this run validates nothing"):
        trainer.fit(max_length=Epochs(1))
    assert trainer.context.progress.batches == 0


def test_a_validation_without_metrics_is_an_error(scripted: Callable[..., Any]) -> None:
    with pytest.raises(UnknownNameError, match="unknown metric for EarlyStopping to monitor 'valid_loss'"):
        scripted(EarlyStopping()).script(None).fit(max_length=Epochs(1))


def test_epochs_without_a_validation_are_skipped(scripted: Callable[..., Any]) -> None:
    stopping = EarlyStopping(patience=1)
    trainer = scripted(stopping).script(1.0, 0.5)
    trainer.fit(max_length=Epochs(4), validation_period=Epochs(2))
    assert (stopping.best, stopping.best_epoch) == (0.5, 4)
