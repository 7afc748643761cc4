"""lernomatic's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dovetail import Batches, Epochs
from dovetail import checkpoint as store
from dovetail.callbacks import Callback, TrainerCallback
from dovetail.compat import zae_engine
from dovetail.compat.lernomatic import Trainer
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers import AMPTrainer, TrainerOptions, TrainingContext, schedules
from dovetail.trainers import Trainer as MainTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy


def quiet(model: Any, **options: Any) -> Any:
    return Trainer(model, verbose=False, **options)


def test_the_lernomatic_defaults_equal_the_seed_document() -> None:
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
    assert names == ["best_ck", "ck_epoch_1_iter_12", "ck_epoch_2_iter_24", "ck_history.jsonl", "ck_run.jsonl"]
    other = quiet(problem.model())
    other.load_history(tmp_path / "here" / "ck_history.jsonl")
    assert other.history == trainer.history
    assert other.get_loss_history() == trainer.loss_history
    other.save_history(tmp_path / "again.jsonl")
    trainer.load_history(tmp_path / "again.jsonl")
    assert trainer.history == other.history
    assert len(trainer.loss_history) == 24
    assert len(trainer.get_acc_history()) == len(trainer.get_val_loss_history()) == 2
    assert trainer.best_acc == max(trainer.acc_history)
    assert trainer.get_cur_acc() == trainer.acc_history[-1]
    assert trainer.get_cur_loss() == trainer.loss_history[-1]


def test_fit_writes_nothing_by_default(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet(problem.model()).fit(problem.batches, problem.batches, max_length=Epochs(1))
    assert list(tmp_path.iterdir()) == []


def test_training_continues_from_the_current_epoch(problem: Problem) -> None:
    trainer = quiet(problem.model(), num_epochs=2, train_dataset=problem.batches, save_every=0, save_hist=False)
    trainer.train()
    trainer.set_num_epochs(5)
    trainer.train()
    assert trainer.cur_epoch == 5
    assert trainer.num_epochs == 5


@pytest.mark.parametrize(("name", "key"), [("SGD", "momentum"), ("RMSprop", "momentum"), ("Adam", None)])
def test_momentum_reaches_optimizers_that_support_it(problem: Problem, name: str, key: str | None) -> None:
    trainer = quiet(problem.model(), optim_function=name, momentum=0.7)
    group = trainer.optimizer.param_groups[0]
    assert trainer.get_momentum() == (0.7 if key else 0.9)
    trainer.set_momentum(0.3)
    assert (group["momentum"] if key else group["betas"][0]) == 0.3
    assert trainer.momentum == 0.3


def test_an_optimizer_without_momentum_raises_an_error(problem: Problem) -> None:
    trainer = quiet(problem.model(), optim_function="Adagrad")
    with pytest.raises(ConfigError, match="momentum: expected an optimizer with 'momentum' or 'betas'"):
        trainer.momentum = 0.5


def test_a_learning_rate_is_set_for_one_group_or_all(problem: Problem) -> None:
    model: Any = problem.model()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[3].parameters()}], lr=0.1)
    trainer = quiet(model, optimizer=optimizer)
    trainer.set_learning_rate(0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    trainer.set_learning_rate(0.3, param_zero=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]
    trainer.learning_rate = 0.2
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]
    assert trainer.get_learning_rate() == 0.2


def test_tensor_learning_rates_remain_tensors(problem: Problem) -> None:
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


def test_drop_last_applies_only_to_training(problem: Problem) -> None:
    trainer = quiet(
        problem.model(),
        train_dataset=(problem.x, problem.y),
        val_dataset=(problem.x, problem.y),
        test_dataset=(problem.x, problem.y),
        batch_size=50,
    )
    assert [len(trainer.train_loader), len(trainer.val_loader), len(trainer.test_loader)] == [1, 2, 2]


def test_a_sufficient_accuracy_ends_training(problem: Problem) -> None:
    trainer = quiet(problem.model(), learning_rate=0.05, stop_when_acc=0.8, num_epochs=200)
    trainer.fit(problem.batches, problem.batches)
    accuracies = trainer.acc_history
    assert accuracies[-1] >= 0.8
    assert all(value < 0.8 for value in accuracies[:-1])


def test_the_keys_of_early_stop_are_checked() -> None:
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


def test_weights_can_be_loaded_from_a_checkpoint_alone(problem: Problem, tmp_path: Path) -> None:
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


def test_momentum_is_the_option_if_the_optimizer_has_none(problem: Problem) -> None:
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
def test_assigning_an_attribute_assigns_the_option(problem: Problem, wrapped: bool) -> None:
    inner = quiet(problem.model(), optim_function="SGD", learning_rate=0.5)
    trainer: Any = AMPTrainer(inner, precision="fp32") if wrapped else inner
    trainer.batch_size, trainer.save_every, trainer.learning_rate = 12, 0, 0.25
    assert (inner.options.batch_size, inner.options.save_every, inner.options.learning_rate) == (12, 0, 0.25)
    assert [group["lr"] for group in inner.optimizer.param_groups] == [0.25]
    with pytest.raises(ConfigError, match="save_every: expected a whole number that is at least -1, got -2"):
        trainer.save_every = -2
    assert trainer.save_every == 0


def test_a_read_number_is_the_one_in_use(problem: Problem) -> None:
    trainer = quiet(problem.model(), optim_function="SGD", learning_rate=0.5, num_epochs=3)
    trainer.optimizer.param_groups[0]["lr"] = 0.125
    trainer.context.config["epochs"] = 7
    batches = problem.batches
    trainer.set_val_dataset(batches)
    assert (trainer.learning_rate, trainer.num_epochs) == (0.125, 7)
    assert trainer.val_dataset is batches
    assert (trainer.options.learning_rate, trainer.options.num_epochs, trainer.options.val_dataset) == (0.5, 3, None)


def test_a_running_trainer_accepts_only_options_that_can_take_effect(problem: Problem) -> None:
    class Assigns(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            trainer.learning_rate = 0.25
            with pytest.raises(ConfigError, match="num_epochs: the trainer is running"):
                trainer.num_epochs = 9

    trainer = quiet(problem.model(), callbacks=[Assigns()])
    trainer.fit(problem.batches, max_length=Batches(1))
    assert (trainer.learning_rate, trainer.num_epochs) == (0.25, 10)


def test_model_optimizer_and_loss_are_the_given_objects(problem: Problem) -> None:
    trainer = quiet(problem.model(), loss_function="CrossEntropyLoss", optimizer_strategy=SGDOptimizerStrategy(lr=0.1))
    assert trainer.loss_function == "CrossEntropyLoss"
    assert trainer.optim_function is trainer.strategies.optimizer
    assert trainer.device_id == -1
    assert trainer.device == torch.device("cpu")


# ------------------------------------------------------------------ attributes that the constructor of the seed sets


def printed(problem: Problem) -> dict[str, Any]:
    """Return another value for every attribute that the constructor of the seed prints."""
    data = (problem.x[:8], problem.y[:8])
    return {
        "num_epochs": 3, "learning_rate": 0.25, "momentum": 0.75, "weight_decay": 0.125,
        "loss_function": "NLLLoss", "optim_function": "SGD", "cur_epoch": 2,
        "checkpoint_dir": "elsewhere", "checkpoint_name": "other", "save_hist": False,
        "verbose": False, "print_every": 5, "save_every": 7, "save_best": True,
        "device_id": -1, "device_map": "cpu",
        "batch_size": 12, "val_batch_size": 6, "test_batch_size": 4,
        "train_dataset": data, "test_dataset": data, "val_dataset": data,
        "shuffle": False, "num_workers": 0, "drop_last": False,
        "lr_scheduler": schedules.Triangular(), "mtm_scheduler": schedules.TriangularMtm(),
        "stop_when_acc": 0.5, "early_stop": {"num_epochs": 2, "improv": 0.5},
        "start_epoch": 4, "best_acc": 0.5, "device": torch.device("cpu"),
        "train_loader": problem.batches, "val_loader": problem.batches, "test_loader": problem.batches,
    }  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
def test_every_constructor_attribute_can_be_read_and_written(problem: Problem, wrapped: bool) -> None:
    for name, value in printed(problem).items():
        trainer: Any = quiet(problem.model(), optim_function="SGD", lr_scheduler=None)
        trainer = AMPTrainer(trainer, precision="fp32") if wrapped else trainer
        getattr(trainer, name)
        setattr(trainer, name, value)
        assert getattr(trainer, name) == value, name


def test_an_assigned_model_optimizer_and_loss_are_used(problem: Problem) -> None:
    trainer = quiet(nn.Linear(6, 1), save_every=0, save_hist=False, num_epochs=1)
    trainer.model = nn.Linear(6, 2)
    trainer.optimizer = partial(torch.optim.SGD, lr=0.5)
    trainer.criterion = nn.MSELoss()
    trainer.set_train_dataset([(x, x[:, :2]) for x, _ in problem.batches])
    model = trainer.get_model()
    first = nn.functional.mse_loss(model(problem.x[:8]), problem.x[:8, :2]).item()
    trainer.train()
    assert trainer.loss_history[0] == pytest.approx(first)
    assert isinstance(trainer.criterion, nn.MSELoss)
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.get_learning_rate() == 0.5


def test_training_continues_from_an_assigned_epoch(problem: Problem) -> None:
    trainer = quiet(problem.model(), train_dataset=problem.batches, num_epochs=5, save_every=0, save_hist=False)
    trainer.cur_epoch = 3
    trainer.train()
    assert (trainer.get_cur_epoch(), trainer.start_epoch, trainer.loss_iter) == (5, 5, 24)
    with pytest.raises(ConfigError, match="cur_epoch: expected a whole number that is at least 0, got -1"):
        trainer.cur_epoch = -1


def test_a_running_trainer_rejects_an_assigned_epoch(problem: Problem) -> None:
    class Assigns(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            with pytest.raises(ConfigError, match="cur_epoch: the trainer is running"):
                trainer.cur_epoch = 9

    trainer = quiet(problem.model(), callbacks=[Assigns()])
    trainer.fit(problem.batches, max_length=Batches(1))


def test_only_an_accuracy_above_the_assigned_one_is_saved(problem: Problem, tmp_path: Path) -> None:
    def train(best: float | None) -> Any:
        trainer = quiet(
            problem.model(), train_dataset=problem.batches, val_dataset=problem.batches, num_epochs=2,
            checkpoint_dir=tmp_path / str(best),
        )  # fmt: skip
        if best is not None:
            trainer.best_acc = best
        trainer.train()
        return trainer

    assert train(None).best_acc == max(train(0.0).acc_history) < 0.99
    assert train(0.99).best_acc == 0.99
    assert [(tmp_path / name / "best_ck").exists() for name in ("None", "0.0", "0.99")] == [True, True, False]


def test_a_reset_accuracy_allows_a_new_best(problem: Problem) -> None:
    trainer = quiet(problem.model(), train_dataset=problem.batches, val_dataset=problem.batches, num_epochs=1)
    trainer.fit()
    trainer.best_acc = 0.0
    assert trainer.best_acc == 0.0 < trainer.get_cur_acc()
    trainer.fit(max_length=Epochs(2))
    assert trainer.best_acc == trainer.acc_history[1]


def test_an_unknown_device_is_named(problem: Problem) -> None:
    trainer = quiet(problem.model())
    with pytest.raises(ConfigError, match="device: expected the CPU or cuda, got 'meta'"):
        trainer.device = "meta"


def test_without_data_there_is_no_loader(problem: Problem) -> None:
    trainer = quiet(problem.model())
    assert (trainer.train_loader, trainer.val_loader, trainer.test_loader) == (None, None, None)
    assert trainer.iter_per_epoch == 0
    trainer.train_loader = loader = DataLoader(TensorDataset(problem.x, problem.y), batch_size=32)
    assert (trainer.train_loader, trainer.iter_per_epoch) == (loader, 3)
    trainer.train_loader = None
    assert trainer.train_loader is None


# ------------------------------------------------------------------ getters and setters


def test_schedulers_are_set_and_returned(problem: Problem) -> None:
    trainer = quiet(problem.model(), optim_function="SGD", train_dataset=problem.batches, num_epochs=1, save_every=0)
    rate = schedules.TriangularScheduler(lr_min=0.0, lr_max=1.0, stepsize=4, start_iter=0, lr_history_size=12)
    momentum = schedules.TriangularMtmScheduler(mtm_min=0.5, mtm_max=0.75, stepsize=4)
    trainer.set_lr_scheduler(rate)
    trainer.set_mtm_scheduler(momentum)
    assert (trainer.get_lr_scheduler(), trainer.get_mtm_scheduler()) == (rate, momentum)
    trainer.save_hist = False
    trainer.train()
    assert rate.lr_history == [rate.value(count) for count in range(12)]
    assert len(rate.lr_history) == trainer.loss_iter
    assert (trainer.learning_rate, trainer.momentum) == (rate.value(12), momentum.value(12))


SCHEDULERS = [
    schedules.StepScheduler(),
    schedules.LinearDecayScheduler(),
    schedules.LogDecayScheduler(),
    schedules.ExponentialDecayScheduler(),
    schedules.WarmRestartScheduler(),
    schedules.TriangularScheduler(),
    schedules.InvTriangularScheduler(),
    schedules.TriangularExpScheduler(),
    schedules.Triangular2Scheduler(),
    schedules.Triangular2ExpScheduler(),
    schedules.EpochSetScheduler({0: 0.1}),
    schedules.TriangularDecayWhenAcc(),
    schedules.DecayWhenAcc(),
    schedules.DecayWhenEpoch(),
    schedules.DecayToEpoch(),
    schedules.TriangularMtmScheduler(),
]


@pytest.mark.parametrize("schedule", SCHEDULERS, ids=lambda it: type(it).__name__)
def test_every_scheduler_has_a_value(schedule: schedules.Schedule) -> None:
    assert 0 <= schedule.get_lr(1) <= 1


def test_a_scheduler_may_have_no_history() -> None:
    schedule = schedules.StepScheduler(lr_history_size=4, no_lr_history=True)
    schedule.get_lr(0)
    assert schedule.lr_history is None


def test_the_parameters_of_the_model_are_its_weights(problem: Problem) -> None:
    trainer = quiet(problem.model())
    params = trainer.get_model_params()
    assert params.keys() == weights(trainer.model).keys()
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in params.items())
    assert Trainer().get_model_params() is None


def test_the_parameters_of_a_trainer_make_another_one_equal(problem: Problem) -> None:
    trainer = quiet(
        problem.model(), num_epochs=2, optim_function="SGD", learning_rate=0.25, momentum=0.75, weight_decay=0.0,
        batch_size=24, shuffle=False, print_every=3, save_every=0, save_hist=False, train_dataset=problem.batches,
    )  # fmt: skip
    trainer.train()
    params = trainer.get_trainer_params()
    assert params == {
        "num_epochs": 2, "learning_rate": 0.25, "momentum": 0.75, "weight_decay": 0.0,
        "loss_function": "CrossEntropyLoss", "optim_function": "SGD", "cur_epoch": 2, "iter_per_epoch": 12,
        "save_every": 0, "print_every": 3, "batch_size": 24, "val_batch_size": 24, "shuffle": False,
    }  # fmt: skip
    other = quiet(problem.model(), train_dataset=problem.batches)
    other.set_trainer_params(params)
    assert other.get_trainer_params() == params
    optimizer = other.optimizer
    other.set_trainer_params(params)
    assert other.optimizer is optimizer
    other.optimizer.param_groups[0]["lr"] = 0.5
    other.set_trainer_params({"learning_rate": 0.25})
    assert other.get_learning_rate() == 0.25
    with pytest.raises(UnknownNameError, match="unknown trainer parameter 'num_epoch': did you mean 'num_epochs'"):
        other.set_trainer_params({"num_epoch": 3})


def test_the_values_of_the_last_epoch_are_returned(problem: Problem) -> None:
    trainer = quiet(problem.model(), num_epochs=2, save_every=0, save_hist=False)
    assert trainer.get_cur_epoch_loss() == trainer.get_loss_history() == trainer.get_acc_history() == []
    assert all(value != value for value in (trainer.get_cur_loss(), trainer.get_cur_acc(), trainer.get_cur_val_loss()))
    trainer.set_train_dataset(problem.batches)
    trainer.set_val_dataset(problem.batches)
    trainer.train()
    assert trainer.get_cur_epoch_loss() == trainer.loss_history[12:]
    assert trainer.get_cur_val_loss() == trainer.val_loss_history[1]
    assert (trainer.get_num_epochs(), trainer.loss_iter, trainer.val_loss_iter, trainer.acc_iter) == (2, 24, 2, 2)


def test_histories_are_written_only_by_the_trainer(problem: Problem) -> None:
    trainer = quiet(problem.model())
    with pytest.raises(ConfigError, match=r"the trainer writes its own histories: .*self.history.extend_losses"):
        trainer.loss_history[0] = 1.0
    with pytest.raises(ConfigError, match="the trainer writes its own histories"):
        trainer.loss_iter += 1
    trainer.history.extend_losses([0.5])
    assert (trainer.loss_iter, trainer.loss_history) == (1, [0.5])


def test_an_overridden_epoch_records_losses_and_steps_schedules(problem: Problem) -> None:
    class Own(Trainer):
        def train_epoch(self) -> None:
            for x, y in self.train_loader:
                loss = self.criterion(self.model(x), y)
                self.context.backward(loss)
                self.context.step()
                self.history.extend_losses([loss.item()])
                self.scheduler_step("update")

        def val_epoch(self) -> None:
            pass

    results = []
    for kind in (Own, Trainer):
        schedule = schedules.TriangularScheduler(lr_min=0.0, lr_max=0.5, stepsize=6, lr_history_size=0)
        trainer = kind(
            problem.model(), train_dataset=problem.batches, num_epochs=2, optim_function="SGD", lr_scheduler=schedule,
            save_every=0, save_hist=False, verbose=False,
        )  # fmt: skip
        trainer.train()
        results.append((trainer.loss_history, schedule.lr_history, trainer.cur_epoch))
    assert results[0] == results[1]
    with pytest.raises(AttributeError, match=r"'apply_lr_schedule': write self.scheduler_step\('update'\)"):
        _ = Trainer().apply_lr_schedule


# ------------------------------------------------------------------ tests and checkpoints


def test_train_tests_after_every_epoch_if_there_is_test_data(problem: Problem) -> None:
    trainer = quiet(problem.model(), train_dataset=problem.batches, num_epochs=2, save_every=0, save_hist=False)
    trainer.train()
    assert trainer.history.get_metric_values("test_loss") == []
    trainer.set_test_dataset(problem.batches[:3])
    trainer.set_num_epochs(4)
    trainer.train()
    found = trainer.history.get_metric_values("test_loss")
    assert len(found) == 2
    assert trainer.test_epoch()["loss"] == found[-1]
    trainer.fit(max_length=Epochs(5))
    assert trainer.history.get_metric_values("test_loss") == found


def test_an_overridden_test_epoch_is_called(problem: Problem) -> None:
    class Tests(Trainer):
        def test_epoch(self) -> Mapping[str, float] | None:
            calls.append(len(self.test_loader))
            return None

    calls: list[int] = []
    data: Any = {"train_dataset": problem.batches, "test_dataset": problem.batches[:5]}
    Tests(problem.model(), verbose=False, num_epochs=3, save_every=0, save_hist=False, **data).train()
    assert calls == [5, 5, 5]


def test_a_checkpoint_restores_the_settings(problem: Problem, tmp_path: Path) -> None:
    data = (problem.x, problem.y)
    settings: Any = {"num_epochs": 2, "save_every": 5, "print_every": 3, "batch_size": 24, "val_batch_size": 32}
    trainer = quiet(problem.model(), train_dataset=data, shuffle=False, checkpoint_dir=tmp_path / "a", **settings)
    trainer.train()
    trainer.save_checkpoint(tmp_path / "ck")
    other = quiet(problem.model(seed=3), train_dataset=data, checkpoint_dir=tmp_path / "b")
    other.load_checkpoint(tmp_path / "ck")
    assert other.get_trainer_params() == trainer.get_trainer_params()
    assert {name: getattr(other, name) for name in settings} == settings
    assert_same_weights(other.model, trainer.model)
    other.set_num_epochs(3)
    trainer.set_num_epochs(3)
    for each in (trainer, other):
        each.train()
    assert_same_weights(other.model, trainer.model)


def test_a_resumed_run_keeps_its_settings(problem: Problem, tmp_path: Path) -> None:
    first = quiet(problem.model(), train_dataset=problem.batches, num_epochs=2, checkpoint_dir=tmp_path)
    first.train()
    second = quiet(problem.model(), train_dataset=problem.batches, num_epochs=4, checkpoint_dir=tmp_path)
    second.fit(resume="auto")
    assert (second.num_epochs, second.cur_epoch) == (4, 4)


def test_a_checkpoint_from_inside_an_epoch_restores_its_batch_size(problem: Problem, tmp_path: Path) -> None:
    data = (problem.x, problem.y)
    trainer = quiet(problem.model(), train_dataset=data, batch_size=24)
    trainer.fit(max_length=Batches(2))
    trainer.save_checkpoint(tmp_path / "ck")
    other = quiet(problem.model(), train_dataset=data, batch_size=8)
    other.load_checkpoint(tmp_path / "ck")
    for each in (trainer, other):
        each.fit(max_length=Epochs(1))
    assert_same_weights(other.model, trainer.model)
    assert other.loss_iter == 4


def test_a_plain_trainer_loads_the_same_checkpoint(problem: Problem, tmp_path: Path) -> None:
    trainer = quiet(problem.model(), train_dataset=problem.batches, num_epochs=1)
    trainer.fit()
    trainer.save_checkpoint(tmp_path / "ck")
    main = MainTrainer(problem.model(), verbose=False)
    main.load_checkpoint(tmp_path / "ck")
    assert_same_weights(main.model, trainer.model)
    main.save_checkpoint(tmp_path / "main")
    assert "trainer_params" not in store.load(tmp_path / "main")
    trainer.load_checkpoint(tmp_path / "main")
    assert trainer.num_epochs == 1


def test_a_class_may_have_the_names_of_two_libraries(problem: Problem, tmp_path: Path) -> None:
    class Both(zae_engine.Trainer, Trainer):
        pass

    trainer = Both(problem.model(), "cpu", num_epochs=1, batch_size=24, log_bar=False, checkpoint_dir=tmp_path)
    trainer.run(1, (problem.x, problem.y))
    assert (trainer.batch_size, trainer.cur_epoch, trainer.loss_iter, len(trainer.log_train["loss"])) == (24, 1, 4, 4)
    trainer.save_checkpoint(tmp_path / "ck")
    other = Both(problem.model(seed=4), "cpu", log_bar=False)
    other.load_checkpoint(tmp_path / "ck")
    assert (other.num_epochs, other.options.batch_size) == (1, 24)
    assert_same_weights(other.model, trainer.model)


@pytest.mark.parametrize("name", ["_init_optimizer", "_init_dataloaders", "_init_history", "apply_lr_schedule"])
def test_an_override_that_is_never_called_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Mine.{name}: it is never called here: "):
        type("Mine", (Trainer,), {name: lambda self: None, "__module__": "mine"})


def test_a_tensorboard_writer_argument_suggests_the_tracker(problem: Problem) -> None:
    with pytest.raises(UnknownNameError, match=r"callbacks=\[Tracker\(TensorBoardLogger\(folder\)\)\]"):
        quiet(problem.model(), tb_writer=None)
    with pytest.raises(AttributeError, match=r"callbacks=\[Tracker\(TensorBoardLogger\(folder\)\)\]"):
        quiet(problem.model()).set_tb_writer(None)
