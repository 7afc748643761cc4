"""Replacement of strategies before a run."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.decorators import TimedTrainer
from dovetail.trainers.reuse import equip
from dovetail.trainers.strategies import AdamOptimizerStrategy
from dovetail.trainers.strategies.base import LossCriterionStrategy, ModelUpdateStrategy

DATA = (torch.arange(16.0).reshape(8, 2) / 16, torch.tensor([0, 1] * 4))


class Noting(ModelUpdateStrategy):
    def __init__(self, name: str, notes: list[str], inner: ModelUpdateStrategy | None = None) -> None:
        self.name, self.notes, self.inner = name, notes, inner

    def setup(self, context: Any) -> None:
        if self.inner is not None:
            self.inner.setup(context)
        self.notes.append(f"{self.name} set up")

    def teardown(self, context: Any) -> None:
        if self.inner is not None:
            self.inner.teardown(context)
        self.notes.append(f"{self.name} torn down")

    def on_train_start(self, context: Any) -> None:
        self.notes.append(f"{self.name} starts")


class Squared(LossCriterionStrategy):
    def compute_loss(self, outputs: Any, labels: Any, context: Any) -> torch.Tensor:
        return (outputs - labels[:, None]).square().mean()


def _trainer(**strategies: Any) -> ComposableTrainer:
    torch.manual_seed(0)
    return ComposableTrainer(nn.Linear(2, 2), num_epochs=1, batch_size=4, verbose=False, **strategies)


def test_hooks_of_new_strategies_replace_those_of_old_ones() -> None:
    notes: list[str] = []
    trainer = _trainer(model_update_strategy=Noting("old", notes))
    equip(trainer, model_update=Noting("new", notes))
    trainer.fit(DATA)
    assert notes == ["old set up", "old torn down", "new set up", "new starts"]


def test_every_strategy_is_set_up_once_and_torn_down_once() -> None:
    notes: list[str] = []

    class Optimizer(AdamOptimizerStrategy):
        def setup(self, context: Any) -> None:
            notes.append("optimizer set up")

        def teardown(self, context: Any) -> None:
            notes.append("optimizer torn down")

    trainer = _trainer(optimizer_strategy=Optimizer(), model_update_strategy=Noting("old", notes))
    equip(trainer, model_update=Noting("new", notes))
    trainer.close()
    trainer.close()
    assert notes == [
        "optimizer set up",
        "old set up",
        "old torn down",
        "new set up",
        "optimizer torn down",
        "new torn down",
    ]


def test_a_new_strategy_may_contain_the_current_one() -> None:
    notes: list[str] = []
    trainer = _trainer(model_update_strategy=Noting("inner", notes))
    equip(trainer, model_update=Noting("outer", notes, trainer.strategies.model_update))
    assert notes == ["inner set up", "inner torn down", "inner set up", "outer set up"]


def test_a_deleted_trainer_tears_down_new_strategies() -> None:
    notes: list[str] = []
    trainer = _trainer()
    equip(trainer, model_update=Noting("new", notes))
    del trainer
    gc.collect()
    assert notes == ["new set up", "new torn down"]


def test_strategy_hooks_still_run_before_callbacks() -> None:
    from dovetail.callbacks import Callback

    notes: list[str] = []

    class Watch(Callback):
        def on_train_start(self, context: Any) -> None:
            notes.append("callback starts")

    trainer = _trainer(callbacks=[Watch()])
    equip(trainer, model_update=Noting("new", []))
    equip(trainer, model_update=Noting("newer", notes))
    trainer.fit(DATA)
    assert notes == ["newer set up", "newer starts", "callback starts"]


def test_a_new_loss_is_used_even_after_a_run() -> None:
    equipped, plain = _trainer(), _trainer(loss_strategy=Squared())
    equipped.evaluate(DATA)
    equip(equipped, loss=Squared())
    assert equipped.fit(DATA).losses == plain.fit(DATA).losses


def test_equip_reaches_the_innermost_trainer() -> None:
    notes: list[str] = []
    trainer: Any = TimedTrainer(_trainer())
    equip(trainer, model_update=Noting("new", notes))
    trainer.fit(DATA)
    assert notes == ["new set up", "new starts"]


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_an_equipped_trainer_can_be_copied(way: str) -> None:
    trainer = _trainer()
    equip(trainer, model_update=Noting("new", []), loss=Squared())
    other = copy.deepcopy(trainer) if way == "copied" else pickle.loads(cloudpickle.dumps(trainer))
    assert other.fit(DATA).losses == trainer.fit(DATA).losses
    for each in (trainer, other):
        assert each.strategies.model_update.notes == ["new set up", "new starts"]
    equip(other, model_update=Noting("newer", []))
    other.fit(DATA, max_length={"epochs": 2})
    assert other.strategies.model_update.notes == ["newer set up", "newer starts"]


@pytest.mark.parametrize(
    ("strategies", "words"),
    [
        ({"los": Squared()}, "unknown role of a strategy 'los': did you mean 'loss'"),
        ({"is_set_up": True}, "unknown role of a strategy 'is_set_up'"),
        ({"optimizer": Squared()}, "optimizer: expected a strategy of this role, got"),
        ({"loss": nn.MSELoss()}, "loss: expected a strategy of this role, got"),
    ],
)
def test_invalid_strategies_are_rejected_without_change(strategies: dict[str, Any], words: str) -> None:
    notes: list[str] = []
    trainer = _trainer(model_update_strategy=Noting("old", notes))
    with pytest.raises(ConfigError, match=words):
        equip(trainer, **strategies)
    trainer.fit(DATA)
    assert notes == ["old set up", "old starts"]
    assert issubclass(UnknownNameError, ConfigError)


def test_a_running_or_closed_trainer_cannot_be_equipped() -> None:
    class Equipping(ModelUpdateStrategy):
        def on_train_start(self, context: Any) -> None:
            equip(context.run.trainer, loss=Squared())

    trainer = _trainer(model_update_strategy=Equipping())
    with pytest.raises(ConfigError, match="the trainer is running; replace its strategies"):
        trainer.fit(DATA)
    trainer.close()
    with pytest.raises(ConfigError, match="the trainer is closed"):
        equip(trainer, loss=Squared())


def test_client_state_is_in_checkpoints(tmp_path: Path) -> None:
    trainer = _trainer()
    trainer.context.client.state = {"drift": {"w": torch.ones(2)}, "rounds": 3}
    trainer.fit(DATA)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    other = _trainer()
    other.load_checkpoint(tmp_path / "checkpoint")
    assert other.context.client.state["rounds"] == 3
    assert torch.equal(other.context.client.state["drift"]["w"], torch.ones(2))
