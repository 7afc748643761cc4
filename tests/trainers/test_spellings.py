"""The names that users of lernomatic, zae-engine and plato know."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, weights
from torch import nn

from dovetail import Batches, Epochs, Trainer
from dovetail.callbacks import TrainerCallback
from dovetail.errors import ConfigError
from dovetail.trainers import AMPTrainer, ProgressChecker, SingleProcess, TrainingContext, basic
from dovetail.trainers.strategies import MultipleForwardPassStepStrategy, TestingStrategy


def quiet(model: Any, **options: Any) -> Trainer:
    return Trainer(model, verbose=False, **options)


# ---------------------------------------------------------------------- lernomatic


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
    model = problem.model()
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
        Trainer(early_stop={"num_epochs": "two", "improv": 0.1})  # type: ignore[dict-item]


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
    trainer.callbacks.add(type("Look", (TrainerCallback,), {
        "on_train_step_start": lambda self, trainer, config, batch=None, **kwargs: (
            rates.append(trainer.learning_rate), momenta.append(trainer.momentum))
    }))  # fmt: skip
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


# ---------------------------------------------------------------------- zae-engine


class Steps(Trainer):
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        return {"loss": self.criterion(self.model(x), y)}

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        outputs = self.model(x)
        return {"loss": self.criterion(outputs, y), "output": outputs, "target": y}


def zae(problem: Problem, cls: type[Trainer] = Steps, **options: Any) -> Trainer:
    model = problem.model()
    return cls(model, "cpu", "train", torch.optim.SGD(model.parameters(), lr=0.1), None, log_bar=False, **options)


def test_run_adds_epochs(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.run(2, problem.batches)
    trainer.run(3, problem.batches, problem.batches)
    assert trainer.progress_checker.get_epoch() == 6
    assert trainer.progress_checker.get_step() == 61


def test_the_best_weights_are_a_real_copy(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.run(1, problem.batches, problem.batches)
    best = weights(trainer.model)
    # From here on the loss can only get worse.
    for group in trainer.optimizer.param_groups:
        group["lr"] = -0.1
    trainer.run(2, problem.batches, problem.batches)
    assert not torch.equal(trainer.model.state_dict()["0.weight"], best["0.weight"])
    trainer.apply_weights()
    assert all(torch.equal(value, best[name]) for name, value in trainer.model.state_dict().items())


def test_applying_weights_that_are_not_there_is_an_error(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="no best weights"):
        zae(problem).apply_weights()


def test_check_better_is_strict(problem: Problem) -> None:
    trainer = zae(problem)
    assert [trainer.check_better(epoch, loss) for epoch, loss in enumerate([2.0, 2.0, 1.0, math.nan])] == [
        True, False, True, False,
    ]  # fmt: skip


def test_validation_keeps_the_training_log(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.run(2, problem.batches, problem.batches[:3])
    assert [float(loss) for loss in trainer.log_train["loss"]] == trainer.loss_history[12:]
    assert len(trainer.log_test["loss"]) == len(trainer.log_test["output"]) == 3
    assert trainer.get_loss_history("train") == trainer.loss_history
    assert trainer.get_loss_history("test") == trainer.val_loss_history


def test_metrics_of_an_epoch_come_from_its_logs(problem: Problem) -> None:
    class WithMetric(Steps):
        def metric_on_epoch_end(self) -> Mapping[str, float]:
            log = self.log_train if self.mode == "train" else self.log_test
            return {"last_loss": float(log["loss"][-1])}

    trainer = zae(problem, WithMetric)
    trainer.run(1, problem.batches, problem.batches[:2])
    assert trainer.train_metrics["last_loss"] == trainer.loss_history[-1]
    assert trainer.test_metrics["last_loss"] == float(trainer.log_test["loss"][-1])
    assert trainer.history.get_latest_metric("train_last_loss") == trainer.loss_history[-1]
    assert trainer.mode == "train"


def test_a_metric_that_fails_leaves_the_mode(problem: Problem) -> None:
    class Fails(Steps):
        def metric_on_epoch_end(self) -> Mapping[str, float]:
            if self.mode == "test":
                raise ZeroDivisionError
            return {}

    trainer = zae(problem, Fails)
    with pytest.raises(ZeroDivisionError):
        trainer.run(1, problem.batches, problem.batches[:2])
    assert trainer.mode == "train"


def test_inference_returns_outputs_and_leaves_everything(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.run(1, problem.batches, problem.batches[:2])
    before = (trainer.mode, dict(trainer.test_metrics), len(trainer.log_test["loss"]), trainer.context.progress.copy())
    outputs = trainer.inference(problem.batches[:5])
    assert len(outputs) == 5
    with torch.no_grad():
        assert torch.equal(outputs[0], trainer.model.eval()(problem.batches[0][0]))
    assert before == (
        trainer.mode, dict(trainer.test_metrics), len(trainer.log_test["loss"]), trainer.context.progress,
    )  # fmt: skip


def test_mode_test_evaluates_and_stays(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.toggle()
    before = weights(trainer.model)
    trainer.run(1, problem.batches)
    assert trainer.mode == "test"
    assert trainer.test_metrics["accuracy"] == trainer.evaluate(problem.batches)["accuracy"]
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    with pytest.raises(ConfigError, match="expected 'train' or 'test', got 'eval'"):
        trainer.toggle("eval")


def test_clipping_and_a_schedule_per_batch(problem: Problem) -> None:
    ours, theirs = problem.model(), problem.model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    trainer = Steps(
        ours, "cpu", "train", optimizer, scheduler, log_bar=False, scheduler_step_on_batch=True, gradient_clip=0.05
    )
    trainer.run(2, problem.batches)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for x, y in problem.batches * 2:
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
    assert_same_weights(ours, theirs)


def test_a_progress_checker_counts_from_one(problem: Problem) -> None:
    checker = ProgressChecker(zae(problem).context)
    checker.update_step()
    checker.update_epoch()
    assert (checker.get_step(), checker.get_epoch()) == (2, 2)
    checker.set_epoch(7)
    assert checker.get_epoch() == 7
    checker.init_state()
    assert (checker.get_step(), checker.get_epoch()) == (1, 1)


# ---------------------------------------------------------------------- plato


def test_hook_methods_fire_before_callbacks_and_with_platos_arguments(problem: Problem) -> None:
    events: list[Any] = []

    class Hooked(Trainer):
        def train_run_start(self, config: Mapping[str, Any]) -> None:
            events.append(("method run_start", config["epochs"]))

        def train_epoch_start(self, config: Mapping[str, Any]) -> None:
            events.append("method epoch_start")

        def train_step_end(self, config: Mapping[str, Any], batch: Any = None, loss: Any = None) -> None:
            events.append(("method step_end", batch, round(float(loss), 6)))

        def train_run_end(self, config: Mapping[str, Any]) -> None:
            events.append("method run_end")

    class Watch(TrainerCallback):
        def on_train_run_start(self, trainer: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
            events.append(("callback run_start", type(trainer).__name__))

        def on_train_step_end(
            self, trainer: Any, config: Any, batch: Any = None, loss: Any = None, **kwargs: Any
        ) -> None:
            events.append(("callback step_end", batch, round(float(loss), 6)))

    trainer = Hooked(problem.model, callbacks=[Watch], num_epochs=1, verbose=False)
    trainer.train(problem.batches[:2])
    losses = [round(loss, 6) for loss in trainer.loss_history]
    assert events == [
        ("method run_start", 1),
        ("callback run_start", "Hooked"),
        "method epoch_start",
        ("method step_end", 0, losses[0]),
        ("callback step_end", 0, losses[0]),
        ("method step_end", 1, losses[1]),
        ("callback step_end", 1, losses[1]),
        "method run_end",
    ]


@pytest.mark.parametrize("runs", [True, False])
def test_a_trainer_that_nobody_holds_is_gone(problem: Problem, runs: bool) -> None:
    class Hooked(Trainer):
        def train_epoch_end(self, config: Mapping[str, Any]) -> None:
            pass

    trainer = Hooked(problem.model(), verbose=False)
    if runs:
        trainer.run(1, problem.batches, problem.batches)
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None


def test_a_run_over_a_train_set_starts_anew(problem: Problem) -> None:
    trainer = quiet(problem.model(), num_epochs=1, batch_size=8)
    for _ in range(2):
        trainer.train((problem.x, problem.y), sampler=list(range(40)))
        assert trainer.context.progress.records == 40
        assert len(trainer.run_history.get_metric_values("train_loss")) == 1
    trainer.train_model({"epochs": 2, "batch_size": 20}, (problem.x, problem.y))
    assert trainer.context.progress.batches == 2 * 4


def test_test_returns_the_accuracy(problem: Problem) -> None:
    trainer = quiet(problem.model())
    expected = trainer.evaluate(problem.batches[:2])["accuracy"]
    assert trainer.test((problem.x, problem.y), sampler=range(16)) == expected


def test_a_testing_strategy_is_heard_through_every_layer(problem: Problem) -> None:
    class Dtype(TestingStrategy):
        def test_model(self, model: Any, config: Any, testset: Any, sampler: Any, context: TrainingContext) -> float:
            return float(model(problem.x.float()).dtype is torch.bfloat16)

    inner = quiet(problem.model().float(), testing_strategy=Dtype())
    assert inner.test(problem.batches) == 0
    assert AMPTrainer(inner, precision="bf16").test(problem.batches) == 1


def test_a_model_may_be_a_class_or_a_factory(problem: Problem) -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)

    assert isinstance(quiet(Net).model, Net)
    assert isinstance(quiet(lambda: nn.Linear(6, 3)).model, nn.Linear)
    with pytest.raises(ConfigError, match="class or function that makes one"):
        quiet("resnet")


class WholeStep(Trainer):
    def perform_forward_and_backward_passes(self, config: Any, examples: Any, labels: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(examples), labels)
        loss.backward()
        self.optimizer.step()
        return loss


class WholeStepByContext(Trainer):
    def perform_forward_and_backward_passes(self, config: Any, examples: Any, labels: Any) -> Any:
        loss = self.criterion(self.model(examples), labels)
        self.context.backward(loss)
        self.context.step()
        return loss


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"accumulation_steps": 4}, "accumulation_steps"),
        ({"gradient_clip": 0.1}, "gradient_clip"),
        ({"training_step_strategy": MultipleForwardPassStepStrategy(2)}, "training_step_strategy"),
    ],
)
def test_a_whole_step_that_misses_an_option_is_an_error(problem: Problem, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"makes its updates alone, so {name} would have no effect"):
        WholeStep(problem.model(), "cpu", verbose=False, **options).fit(problem.batches, max_length=Epochs(1))


def test_a_whole_step_through_the_context_has_every_option(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="so precision='fp16' would have no effect"):
        AMPTrainer(WholeStep(problem.model(), "cpu", verbose=False), precision="fp16").fit(problem.batches)
    options: dict[str, Any] = {"accumulation_steps": 4, "gradient_clip": 0.1, "verbose": False}
    ours, plain = WholeStepByContext(problem.model(), "cpu", **options), Trainer(problem.model(), "cpu", **options)
    for trainer in (ours, plain):
        trainer.fit(problem.batches, max_length=Epochs(2))
    assert ours.context.progress.updates == plain.context.progress.updates == 6
    assert_same_weights(ours.model, plain.model)


def test_the_current_epoch_is_the_running_or_the_last_one(problem: Problem) -> None:
    class Looks(Trainer):
        def train_epoch_start(self, config: Any) -> None:
            seen.append(("start", self.current_epoch))

        def train_step_start(self, config: Any, batch: Any = None) -> None:
            if batch in (0, 11):
                seen.append((batch, self.current_epoch))

        def train_epoch_end(self, config: Any) -> None:
            seen.append(("end", self.current_epoch))

    seen: list[Any] = []
    trainer = Looks(problem.model(), batch_size=8, verbose=False)
    trainer.train_model({"epochs": 3}, (problem.x, problem.y))
    assert seen == [(moment, epoch) for epoch in (1, 2, 3) for moment in ("start", 0, 11, "end")]
    assert trainer.current_epoch == 3
    trainer.fit(max_length=Batches(36 + 5))
    assert trainer.current_epoch == 4
    trainer.reset()
    assert trainer.current_epoch == 1


def test_the_current_epoch_survives_an_error(problem: Problem) -> None:
    def fail(trainer: Any, batch: Any) -> Any:
        raise ZeroDivisionError

    trainer = quiet(problem.model(), train_step=fail)
    trainer.context.progress.epoch = 2
    with pytest.raises(ZeroDivisionError):
        trainer.fit(problem.batches, max_length=Epochs(3))
    assert trainer.current_epoch == 2


def test_ids_and_aliases(problem: Problem) -> None:
    trainer = quiet(problem.model())
    trainer.set_client_id(4)
    assert trainer.client_id == trainer.context.client_id == 4
    assert trainer.current_epoch == 1
    assert SingleProcess is Trainer is basic.Trainer
