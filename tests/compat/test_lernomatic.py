"""lernomatic's names."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights

from dovetail import Batches, Epochs
from dovetail.callbacks import Callback, TrainerCallback
from dovetail.compat.lernomatic import Trainer
from dovetail.errors import ConfigError
from dovetail.trainers import AMPTrainer, TrainerOptions, TrainingContext
from dovetail.trainers.strategies import SGDOptimizerStrategy


def quiet(model: Any, **options: Any) -> Any:
    return Trainer(model, verbose=False, **options)


def test_the_defaults_are_those_of_the_seed() -> None:
    options = Trainer().options
    expected = {
        "num_epochs": 10, "learning_rate": 1e-4, "momentum": 0.5, "weight_decay": 1e-5,
        "loss_function": "CrossEntropyLoss", "optim_function": "Adam", "checkpoint_dir": "checkpoint",
        "checkpoint_name": "ck", "save_hist": True, "verbose": True, "print_every": 10, "save_every": -1,
        "save_best": False, "device_id": -1, "device_map": None, "batch_size": 64, "val_batch_size": 0,
        "test_batch_size": 0, "train_dataset": None, "val_dataset": None, "test_dataset": None, "shuffle": True,
        "num_workers": 1, "drop_last": True, "lr_scheduler": None, "mtm_scheduler": None, "stop_when_acc": 0.0,
        "early_stop": None,
    }  # fmt: skip
    assert {name: getattr(options, name) for name in expected} == expected


def test_train_runs_to_num_epochs_and_writes_checkpoints_and_history(problem: Problem, tmp_path: Path) -> None:
    trainer = quiet(
        problem.model(),
        num_epochs=2,
        learning_rate=0.01,
        train_dataset=(problem.x, problem.y),
        val_dataset=(problem.x, problem.y),
        batch_size=8,
        checkpoint_dir=tmp_path / "here",
    )
    assert trainer.train() > 0
    assert trainer.cur_epoch == 2
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == ["best_ck", "ck_epoch_1_iter_12", "ck_epoch_2_iter_24", "ck_history.jsonl"]
    other = quiet(problem.model())
    other.load_history(tmp_path / "here" / "ck_history.jsonl")
    assert other.history == trainer.history
    assert other.get_loss_history() == trainer.loss_history
    assert len(trainer.loss_history) == 24
    assert len(trainer.get_acc_history()) == len(trainer.get_val_loss_history()) == 2
    assert trainer.best_acc == max(trainer.acc_history)
    assert trainer.get_cur_acc() == trainer.acc_history[-1]
    assert trainer.get_cur_loss() == trainer.loss_history[-1]


def test_fit_writes_nothing_unless_asked(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet(problem.model()).fit(problem.batches, problem.batches, max_length=Epochs(1))
    assert list(tmp_path.iterdir()) == []


def test_training_goes_on_from_the_current_epoch(problem: Problem) -> None:
    trainer = quiet(problem.model(), num_epochs=2, train_dataset=problem.batches, save_every=0, save_hist=False)
    trainer.train()
    trainer.set_num_epochs(5)
    trainer.train()
    assert trainer.cur_epoch == 5
    assert trainer.num_epochs == 5


@pytest.mark.parametrize(("name", "key"), [("SGD", "momentum"), ("RMSprop", "momentum"), ("Adam", None)])
def test_momentum_reaches_the_optimizers_that_take_it(problem: Problem, name: str, key: str | None) -> None:
    trainer = quiet(problem.model(), optim_function=name, momentum=0.7)
    group = trainer.optimizer.param_groups[0]
    assert trainer.get_momentum() == (0.7 if key else 0.9)
    trainer.set_momentum(0.3)
    assert (group["momentum"] if key else group["betas"][0]) == 0.3
    assert trainer.momentum == 0.3


def test_an_optimizer_without_momentum_says_so(problem: Problem) -> None:
    trainer = quiet(problem.model(), optim_function="Adagrad")
    with pytest.raises(ConfigError, match="momentum: expected an optimizer with 'momentum' or 'betas'"):
        trainer.momentum = 0.5


def test_a_learning_rate_is_set_for_one_group_or_all(problem: Problem) -> None:
    model: Any = problem.model()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[3].parameters()}], lr=0.1)
    trainer = quiet(model, optimizer=optimizer)
    trainer.set_learning_rate(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    trainer.learning_rate = 0.2
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]
    assert trainer.get_learning_rate() == 0.2


def test_rates_that_are_tensors_stay_tensors(problem: Problem) -> None:
    optimizer = partial(
        torch.optim.Adam, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True
    )
    trainer = quiet(problem.model(), optimizer=optimizer)
    (group,) = trainer.optimizer.param_groups
    rate, momentum = group["lr"], group["betas"][0]
    trainer.learning_rate, trainer.momentum = 0.5, 0.25
    assert (group["lr"] is rate, group["betas"][0] is momentum) == (True, True)
    assert (float(rate), float(momentum)) == (0.5, 0.25)


def test_a_new_batch_size_takes_effect(problem: Problem) -> None:
    trainer = quiet(problem.model(), train_dataset=(problem.x, problem.y), batch_size=8)
    assert len(trainer.train_loader) == 12
    trainer.set_batch_size(24)
    assert len(trainer.train_loader) == 4
    assert trainer.val_batch_size == trainer.test_batch_size == 24


def test_drop_last_is_for_training_only(problem: Problem) -> None:
    trainer = quiet(
        problem.model(),
        train_dataset=(problem.x, problem.y),
        val_dataset=(problem.x, problem.y),
        test_dataset=(problem.x, problem.y),
        batch_size=50,
    )
    assert [len(trainer.train_loader), len(trainer.val_loader), len(trainer.test_loader)] == [1, 2, 2]


def test_accuracy_that_is_high_enough_ends_training(problem: Problem) -> None:
    trainer = quiet(problem.model(), learning_rate=0.05, stop_when_acc=0.8, num_epochs=200)
    trainer.fit(problem.batches, problem.batches)
    accuracies = trainer.acc_history
    assert accuracies[-1] >= 0.8
    assert all(value < 0.8 for value in accuracies[:-1])


def test_early_stop_is_checked_for_its_keys() -> None:
    with pytest.raises(ConfigError, match="'num_epochs' and 'improv', got \\['patience'\\]"):
        Trainer(early_stop={"patience": 3})
    with pytest.raises(ConfigError, match=r"early_stop: expected numbers, got .'num_epochs': 'two'"):
        Trainer(early_stop={"num_epochs": "two", "improv": 0.1})


def test_an_lr_and_a_momentum_schedule_move_together(problem: Problem) -> None:
    from dovetail.trainers.schedules import Triangular, TriangularMtm

    model = problem.model()
    trainer = quiet(
        model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1.0),
        lr_scheduler=Triangular(lr_min=0.1, lr_max=1.0, stepsize=12),
        mtm_scheduler=TriangularMtm(mtm_min=0.5, mtm_max=0.9, stepsize=12),
    )
    rates, momenta = [], []

    class Look(TrainerCallback):
        def on_train_step_start(self, trainer: Any, config: Any, batch: Any = None, **kwargs: Any) -> None:
            rates.append(trainer.learning_rate)
            momenta.append(trainer.momentum)

    trainer.context.callbacks.add(Look)
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert rates[0] == pytest.approx(0.1)
    assert momenta[0] == pytest.approx(0.9)
    assert rates[12] == pytest.approx(1.0)
    assert momenta[12] == pytest.approx(0.5)


def test_weights_alone_come_from_a_checkpoint(problem: Problem, tmp_path: Path) -> None:
    trainer = quiet(problem.model())
    trainer.fit(problem.batches, max_length=Epochs(1))
    trainer.save_checkpoint(tmp_path / "ck")
    other = quiet(problem.model(seed=9))
    other.load_model_checkpoint(tmp_path / "ck")
    assert_same_weights(trainer.model, other.model)
    assert other.cur_epoch == 0


def test_every_option_is_an_attribute(problem: Problem) -> None:
    trainer = Trainer(problem.model(), "cpu", verbose=False)
    effective = {"val_batch_size": 64, "test_batch_size": 64, "verbose": False}
    for field in fields(TrainerOptions):
        assert getattr(trainer, field.name) == effective.get(field.name, field.default), field.name
        assert getattr(AMPTrainer(trainer), field.name) == getattr(trainer, field.name)


def test_momentum_is_the_option_where_the_optimizer_has_none(problem: Problem) -> None:
    trainer = Trainer(problem.model(), "cpu", verbose=False)
    assert (trainer.momentum, trainer.get_momentum()) == (0.5, 0.9)
    trainer.momentum = 0.7
    assert (trainer.momentum, trainer.get_momentum()) == (0.7, 0.7)
    assert Trainer(momentum=0.25).momentum == 0.25


def test_a_subclass_may_not_assign_an_option_before_the_constructor(problem: Problem) -> None:
    class Early(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seed = 3
            super().__init__(*args, **kwargs)

    with pytest.raises(ConfigError, match=r"seed: this is an option; pass it as a keyword to super\(\).__init__\(\)"):
        Early(problem.model())


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_assignment_is_one_to_the_options(problem: Problem, wrapped: bool) -> None:
    inner = quiet(problem.model(), optim_function="SGD", learning_rate=0.5)
    trainer: Any = AMPTrainer(inner, precision="fp32") if wrapped else inner
    trainer.batch_size, trainer.save_every, trainer.learning_rate = 12, 0, 0.25
    assert (inner.options.batch_size, inner.options.save_every, inner.options.learning_rate) == (12, 0, 0.25)
    assert [group["lr"] for group in inner.optimizer.param_groups] == [0.25]
    with pytest.raises(ConfigError, match="save_every: expected a whole number that is at least -1, got -2"):
        trainer.save_every = -2
    assert trainer.save_every == 0


def test_a_number_is_the_one_in_use(problem: Problem) -> None:
    trainer = quiet(problem.model(), optim_function="SGD", learning_rate=0.5, num_epochs=3)
    trainer.optimizer.param_groups[0]["lr"] = 0.125
    trainer.context.config["epochs"] = 7
    batches = problem.batches
    trainer.set_val_dataset(batches)
    assert (trainer.learning_rate, trainer.num_epochs) == (0.125, 7)
    assert trainer.val_dataset is batches
    assert (trainer.options.learning_rate, trainer.options.num_epochs, trainer.options.val_dataset) == (0.5, 3, None)


def test_a_running_trainer_takes_only_what_can_take_effect(problem: Problem) -> None:
    class Assigns(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            trainer.learning_rate = 0.25
            with pytest.raises(ConfigError, match="num_epochs: the trainer is running"):
                trainer.num_epochs = 9

    trainer = quiet(problem.model(), callbacks=[Assigns()])
    trainer.fit(problem.batches, max_length=Batches(1))
    assert (trainer.learning_rate, trainer.num_epochs) == (0.25, 10)


def test_pieces_are_what_was_given(problem: Problem) -> None:
    trainer = quiet(problem.model(), loss_function="CrossEntropyLoss", optimizer_strategy=SGDOptimizerStrategy(lr=0.1))
    assert trainer.loss_function == "CrossEntropyLoss"
    assert trainer.optim_function is trainer.strategies.optimizer
    assert trainer.device_id == -1
    assert trainer.device == torch.device("cpu")
