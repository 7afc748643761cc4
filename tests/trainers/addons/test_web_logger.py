from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights

from dovetail.compat.zae_engine import Trainer
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.tracking import NeptuneLogger, Tracker, WandBLogger
from dovetail.trainers.addons import NeptuneLoggerAddon, StateManagerAddon, WandBLoggerAddon

BOTH = {"wandb": {"project": "digits", "mode": "offline"}, "neptune": {"project_name": "team/digits", "api_tkn": "x"}}


def make(problem: Problem, *add_ons: type[Any], **options: Any) -> Any:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer.add_on(*add_ons)(model, "cpu", optimizer=optimizer, log_bar=False, **options)


def test_an_add_on_adds_a_tracker_with_its_logger(problem: Problem) -> None:
    trainer = make(problem, WandBLoggerAddon, web_logger={"wandb": BOTH["wandb"]})
    (logger,) = trainer.tracker.loggers
    assert isinstance(logger, WandBLogger)
    assert (logger.project, logger.mode) == ("digits", "offline")
    assert [each for each in trainer.context.callbacks if isinstance(each, Tracker)] == [trainer.tracker]


def test_the_neptune_add_on_accepts_the_option_names_of_zae(problem: Problem) -> None:
    (logger,) = make(problem, NeptuneLoggerAddon, web_logger={"neptune": BOTH["neptune"]}).tracker.loggers
    assert isinstance(logger, NeptuneLogger)
    assert (logger.project, logger.api_token) == ("team/digits", "x")


@pytest.mark.parametrize(
    "order",
    list(itertools.permutations((WandBLoggerAddon, NeptuneLoggerAddon, StateManagerAddon))),
    ids=lambda order: "-".join(kind.__name__[0] for kind in order),
)
def test_wandb_and_neptune_add_ons_work_together_in_any_order(
    problem: Problem, tmp_path: Path, order: tuple[type[Any], ...]
) -> None:
    trainer = make(problem, *order, web_logger=BOTH, save_path=tmp_path)
    assert [type(logger) for logger in trainer.tracker.loggers] == [NeptuneLogger, WandBLogger]
    assert [each for each in trainer.context.callbacks if isinstance(each, Tracker)] == [trainer.tracker]


def test_a_logger_add_on_keeps_the_callbacks_of_the_user(problem: Problem) -> None:
    own = Tracker()
    trainer = make(problem, WandBLoggerAddon, web_logger={"wandb": {}}, callbacks=[own])
    assert next(iter(trainer.context.callbacks)) is own
    assert list(trainer.context.callbacks)[-1] is trainer.tracker


def test_offline_tracking_does_not_change_training(problem: Problem, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    settings = {"project": "digits", "mode": "offline", "dir": str(tmp_path)}
    tracked, alone = make(problem, WandBLoggerAddon, web_logger={"wandb": settings}), make(problem)
    for trainer in (tracked, alone):
        trainer.run(2, problem.batches, problem.batches)
    assert_same_weights(tracked.model, alone.model)
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"valid_loss" in file.read_bytes()


def test_the_logger_add_ons_reject_invalid_arguments_by_name(problem: Problem) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown web_logger 'wanbd': did you mean 'wandb'"):
        make(problem, WandBLoggerAddon, web_logger={"wanbd": {}})
    with pytest.raises(ConfigError, match=r"NeptuneLoggerAddon needs its settings as \{'neptune': \{…\}\}, got None"):
        make(problem, WandBLoggerAddon, NeptuneLoggerAddon, web_logger={"wandb": {}})
    with pytest.raises(ConfigError, match=r"web_logger: expected settings as \{'wandb': \{…\}\}, got 'wandb'"):
        make(problem, WandBLoggerAddon, web_logger="wandb")
    with pytest.raises(TypeError, match="web_logger"):
        make(problem, WandBLoggerAddon)
