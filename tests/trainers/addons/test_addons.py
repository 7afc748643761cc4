from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights

from dovetail import Trainer
from dovetail import checkpoint as store
from dovetail.errors import CheckpointError, UnknownNameError
from dovetail.trainers.addons import AddOnBase, SignalHandlerAddon, StateManagerAddon


def make(problem: Problem, cls: type[Any], **options: Any) -> Any:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    return cls(model, "cpu", mode="train", optimizer=optimizer, scheduler=scheduler, log_bar=False, **options)


@pytest.mark.parametrize(("save_format", "name"), [("ckpt", "model.ckpt"), ("safetensors", "model.safetensors")])
def test_the_state_manager_keeps_the_newest_state_and_the_best_weights(
    problem: Problem, tmp_path: Path, save_format: str, name: str
) -> None:
    extended = Trainer.add_on(StateManagerAddon)
    trainer = make(problem, extended, save_path=tmp_path / "checkpoints", save_format=save_format)
    trainer.run(3, problem.batches, problem.batches)
    assert [path.name for path in (tmp_path / "checkpoints").glob("ck_epoch_*")] == ["ck_epoch_3_iter_36"]
    weights = store.load_model_file(tmp_path / "checkpoints" / name)
    best = trainer.weight_buffer["weight"]
    assert all(torch.equal(weights[key], value) for key, value in best.items())


def test_a_restored_state_trains_on_exactly(problem: Problem, tmp_path: Path) -> None:
    extended = Trainer.add_on(StateManagerAddon)
    whole = make(problem, extended, save_path=tmp_path / "whole")
    whole.run(4, problem.batches, problem.batches)
    make(problem, extended, save_path=tmp_path / "cut").run(2, problem.batches, problem.batches)
    resumed = make(problem, extended, save_path=tmp_path / "cut")
    _ = resumed.log_train
    resumed.load_state()
    resumed.run(2, problem.batches, problem.batches)
    assert_same_weights(resumed.model, whole.model)
    assert resumed.history == whole.history
    assert resumed.loss_buffer == whole.loss_buffer
    assert resumed.save_state() == tmp_path / "cut" / "state"


def test_mistakes_are_named(problem: Problem, tmp_path: Path) -> None:
    extended = Trainer.add_on(StateManagerAddon)
    with pytest.raises(UnknownNameError, match="did you mean 'safetensor"):
        make(problem, extended, save_path=tmp_path, save_format="safetensrs")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        make(problem, extended, save_path=tmp_path).load_state()
    with pytest.raises(TypeError, match="save_path"):
        make(problem, extended)


def test_add_ons_stack_in_any_order(problem: Problem, tmp_path: Path) -> None:
    models = []
    for order in ((StateManagerAddon, SignalHandlerAddon), (SignalHandlerAddon, StateManagerAddon)):
        extended = Trainer.add_on(*order)
        assert extended.__mro__[1] is order[-1]
        trainer = make(problem, extended, save_path=tmp_path / order[0].__name__, signal_save_path=tmp_path / "signal")
        trainer.run(2, problem.batches)
        models.append(trainer.model)
    assert_same_weights(*models)


def test_an_add_on_may_mount_itself_in_its_own_way(problem: Problem) -> None:
    class Renamed(AddOnBase):
        @classmethod
        def apply(cls, base: type[Any]) -> type[Any]:
            return type("Mine", (base,), {"is_mine": True})

    assert Trainer.add_on(Renamed).is_mine
