"""zae-engine's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dovetail.compat.zae_engine import ProgressChecker, Trainer
from dovetail.compat.zae_engine.addons import (
    AddOnBase,
    MultiGPUAddon,
    NeptuneLoggerAddon,
    PrecisionMixerAddon,
    SignalHandlerAddon,
    StateManagerAddon,
    WandBLoggerAddon,
)
from dovetail.errors import ConfigError
from dovetail.tracking import Logger, NeptuneLogger, WandBLogger
from dovetail.tracking.base import Run
from dovetail.trainers.schedules import CosineAnnealingScheduler, SchedulerBase, SchedulerChain, WarmUpScheduler


class Steps(Trainer):
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        return {"loss": self.criterion(self.model(x), y)}

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        outputs = self.model(x)
        return {"loss": self.criterion(outputs, y), "output": outputs, "target": y}


def zae(problem: Problem, cls: type[Trainer] = Steps, **options: Any) -> Any:
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


def test_applying_missing_weights_is_an_error(problem: Problem) -> None:
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
    assert [float(loss) for loss in trainer.log_train["loss"]] == trainer.get_loss_history()[12:]
    assert len(trainer.log_test["loss"]) == len(trainer.log_test["output"]) == 3
    assert trainer.get_loss_history("train") == trainer.get_loss_history()
    assert trainer.get_loss_history("test") == trainer.history.get_metric_values("valid_loss")


def test_metrics_of_an_epoch_are_computed_from_its_logs(problem: Problem) -> None:
    class WithMetric(Steps):
        def metric_on_epoch_end(self) -> Mapping[str, float]:
            log = self.log_train if self.mode == "train" else self.log_test
            return {"last_loss": float(log["loss"][-1])}

    trainer = zae(problem, WithMetric)
    trainer.run(1, problem.batches, problem.batches[:2])
    assert trainer.train_metrics["last_loss"] == trainer.get_loss_history()[-1]
    assert trainer.test_metrics["last_loss"] == float(trainer.log_test["loss"][-1])
    assert trainer.history.get_latest_metric("train_last_loss") == trainer.get_loss_history()[-1]
    assert trainer.mode == "train"


def test_a_failing_metric_restores_the_mode(problem: Problem) -> None:
    class Fails(Steps):
        def metric_on_epoch_end(self) -> Mapping[str, float]:
            if self.mode == "test":
                raise ZeroDivisionError
            return {}

    trainer = zae(problem, Fails)
    with pytest.raises(ZeroDivisionError):
        trainer.run(1, problem.batches, problem.batches[:2])
    assert trainer.mode == "train"


def test_inference_returns_outputs_and_restores_training_mode(problem: Problem) -> None:
    def seen() -> tuple[Any, ...]:
        metrics = (dict(trainer.train_metrics), dict(trainer.test_metrics))
        return trainer.mode, *metrics, len(trainer.log_train["loss"]), trainer.context.progress.copy()

    trainer = zae(problem)
    trainer.run(1, problem.batches, problem.batches[:2])
    before = seen()
    outputs = trainer.inference(problem.batches[:5])
    assert len(outputs) == 5
    with torch.no_grad():
        assert torch.equal(outputs[0], trainer.model.eval()(problem.batches[0][0]))
    assert seen() == before


def test_the_test_log_holds_the_values_of_inference(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.run(1, problem.batches, problem.batches[:2])
    outputs = trainer.inference(problem.batches[:5])
    assert (len(trainer.log_test["loss"]), len(trainer.log_test["target"])) == (5, 5)
    assert all(torch.equal(one, other) for one, other in zip(trainer.log_test["output"], outputs, strict=True))


def test_mode_test_evaluates_and_is_kept(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.toggle()
    before = weights(trainer.model)
    trainer.run(1, problem.batches)
    assert trainer.mode == "test"
    assert trainer.test_metrics["accuracy"] == trainer.evaluate(problem.batches)["accuracy"]
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    with pytest.raises(ConfigError, match="expected 'train' or 'test', got 'eval'"):
        trainer.toggle("eval")


def test_the_mode_is_test_while_a_test_step_runs(problem: Problem) -> None:
    class Looks(Steps):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            modes.append(self.mode)
            return super().train_step(batch)

        def test_step(self, batch: Any) -> Mapping[str, Any]:
            modes.append(self.mode)
            return super().test_step(batch)

    modes: list[str] = []
    trainer = zae(problem, Looks)
    trainer.run(1, problem.batches[:2], problem.batches[:1])
    trainer.inference(problem.batches[:1])
    assert modes == ["train", "train", "test", "test"]
    assert trainer.mode == "train"


def test_a_failing_test_step_restores_the_mode(problem: Problem) -> None:
    class Fails(Steps):
        def test_step(self, batch: Any) -> Mapping[str, Any]:
            raise ZeroDivisionError

    trainer = zae(problem, Fails)
    with pytest.raises(ZeroDivisionError):
        trainer.run(1, problem.batches[:1], problem.batches[:1])
    assert trainer.mode == "train"


def test_every_step_is_logged_through_logging(problem: Problem) -> None:
    class Counts(AddOnBase):
        @classmethod
        def apply(cls, base: type[Any]) -> type[Any]:
            class Counting(base):  # type: ignore[misc]  # made at run time
                def __init__(self, *args: Any, told: list[str], **kwargs: Any) -> None:
                    super().__init__(*args, **kwargs)
                    self.told = told

                def logging(self, step_dict: Mapping[str, Any]) -> None:
                    super().logging(step_dict)
                    self.told.append(self.mode)

            return Counting

    told: list[str] = []
    trainer = zae(problem, Steps.add_on(Counts), told=told)
    trainer.run(1, problem.batches[:2], problem.batches[:3])
    assert told == ["train"] * 2 + ["test"] * 3
    assert (len(trainer.log_train["loss"]), len(trainer.log_test["loss"])) == (2, 3)


def test_logging_appends_to_the_log_of_the_mode(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.log_train["loss"] = [0.1]
    trainer.logging({"loss": torch.tensor(0.5, requires_grad=True), "name": "x"})
    trainer.toggle()
    trainer.logging({"loss": 0.25})
    assert trainer.log_train == {"loss": [0.1, torch.tensor(0.5)], "name": ["x"]}
    assert not trainer.log_train["loss"][1].requires_grad
    assert trainer.log_test == {"loss": [0.25]}


def test_a_reset_of_the_logs_keeps_the_metrics_by_default(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.run(1, problem.batches, problem.batches[:2])
    trainer.log_reset()
    assert (trainer.log_train, trainer.log_test) == ({}, {})
    assert (trainer.train_metrics["loss"] > 0, trainer.test_metrics["loss"] > 0) == (True, True)
    trainer.log_reset(epoch_end=True)
    assert (trainer.train_metrics, trainer.test_metrics) == ({}, {})


def test_print_log_returns_means_as_text(problem: Problem) -> None:
    trainer = zae(problem)
    trainer.logging({"loss": torch.tensor(1.0), "acc": 0.5, "output": torch.ones(2), "pair": torch.tensor([0.0, 4.0])})
    trainer.logging({"loss": torch.tensor(2.0), "acc": 1.0, "output": torch.ones(2), "pair": torch.tensor([1.0, 3.0])})
    assert trainer.print_log(cur_batch=2, num_batch=12) == {
        "Batch": "2/12", "LR": "1.000e-01", "loss": "1.500000", "acc": "0.750000", "pair": "2.000000",
    }  # fmt: skip
    trainer.toggle("test")
    assert trainer.print_log(1, 3) == {"Batch": "1/3", "LR": "1.000e-01"}
    assert Trainer().print_log(1, 1) == {"Batch": "1/1", "LR": "0.000e+00"}


def test_the_loaders_of_run_and_their_sizes_are_attributes(problem: Problem) -> None:
    dataset = TensorDataset(problem.x, problem.y)
    loader, valid_loader = DataLoader(dataset, batch_size=8), DataLoader(dataset, batch_size=32)
    trainer = zae(problem, batch_size=24)
    names = ("loader", "valid_loader", "batch_size", "valid_batch_size", "n_data", "n_valid_data")
    assert [getattr(trainer, name) for name in names] == [None] * 6
    trainer.run(1, loader)
    assert [getattr(trainer, name) for name in names] == [loader, None, 8, 0, 96, 0]
    trainer.run(n_epoch=1, loader=loader, valid_loader=valid_loader)
    assert (trainer.loader, trainer.valid_loader) == (loader, valid_loader)
    assert (trainer.batch_size, trainer.valid_batch_size, trainer.n_data, trainer.n_valid_data) == (8, 32, 96, 96)
    trainer.run(1, (problem.x, problem.y), problem.batches)
    assert [getattr(trainer, name) for name in names[2:]] == [24, None, 96, None]


def test_the_batch_size_of_a_loader_cannot_be_assigned(problem: Problem) -> None:
    with pytest.raises(AttributeError, match="batch_size"):
        zae(problem).batch_size = 4


def test_values_move_to_the_host_and_to_the_device(problem: Problem) -> None:
    trainer = zae(problem)
    tensor = torch.ones(2, requires_grad=True)
    assert not trainer._to_cpu(tensor).requires_grad
    moved, number = trainer._to_cpu(tensor, 1)
    assert torch.equal(moved, tensor)
    assert number == 1
    assert trainer._to_device(tensor) is tensor
    assert trainer._to_device(tensor, 1)[1] == 1
    assert trainer._to_device(x=tensor, name="n") == {"x": tensor, "name": "n"}


def test_an_override_that_is_never_called_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Mine.run_batch: it is never called here: override a verb: train_step, "):
        type("Mine", (Trainer,), {"run_batch": lambda self, batch: None, "__module__": "mine"})
    with pytest.raises(
        ConfigError, match=r"Mine.run_epoch: it is never called here: override train_epoch or val_epoch"
    ):
        type("Mine", (Trainer,), {"run_epoch": lambda self, loader: None, "__module__": "mine"})
    with pytest.warns(UserWarning, match=r"Mine.print_log: the loop does not call it; give a callback with on_report"):
        type("Mine", (Trainer,), {"print_log": lambda self, batch, number: {}, "__module__": "mine"})


def test_losses_are_kept_for_two_modes(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="expected 'train' or 'test', got 'valid'"):
        zae(problem).get_loss_history("valid")


def test_weights_are_loaded_from_a_file(problem: Problem, tmp_path: Path) -> None:
    trainer = zae(problem)
    trainer.save_model(tmp_path / "model.pth")
    other = Steps(problem.model(seed=5), "cpu", log_bar=False)
    other.apply_weights(tmp_path / "model.pth", strict=True)
    assert_same_weights(other.model, trainer.model)


def test_check_better_accepts_a_loss_by_name(problem: Problem) -> None:
    trainer = zae(problem)
    assert trainer.check_better(cur_epoch=3, cur_loss=0.5)
    assert (trainer.loss_buffer, trainer.weight_buffer["epoch"]) == (0.5, 3)


# ------------------------------------------------------------------ add-ons and schedulers


def test_the_state_manager_restores_its_state(problem: Problem, tmp_path: Path) -> None:
    extended = Steps.add_on(StateManagerAddon)
    trainer = zae(problem, extended, save_path=str(tmp_path), save_format="ckpt")
    trainer.run(1, problem.batches, problem.batches)
    trainer.save_state()
    assert (tmp_path / "model.ckpt").is_file()
    other = zae(problem, extended, save_path=str(tmp_path), save_format="ckpt")
    other.load_state()
    assert_same_weights(other.model, trainer.model)
    assert other.progress_checker.get_epoch() == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_list_of_devices_trains_on_each(problem: Problem) -> None:
    def make(cls: type[Any], device: Any, **more: Any) -> Any:
        return cls(problem.model().double(), device, "train", None, None, seed=1, log_bar=False, **more)

    cpu = torch.device("cpu")
    alone = make(Steps, cpu, batch_size=16)
    both = make(Steps.add_on(MultiGPUAddon), [cpu, cpu], batch_size=8, init_method="tcp://localhost:12355")
    for trainer in (alone, both):
        trainer.run(1, (problem.x.double(), problem.y))
    for value, expected in zip(both.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", ["auto", "fp32", "fp16", "bf16", ["bf16", "fp16"]])
def test_every_precision_trains(problem: Problem, precision: Any) -> None:
    trainer = zae(problem, Steps.add_on(PrecisionMixerAddon), precision=precision)
    trainer.run(1, problem.batches)
    assert len(trainer.get_loss_history()) == 12


def test_the_signal_paths_are_attributes_of_the_trainer(problem: Problem, tmp_path: Path) -> None:
    trainer = zae(
        problem,
        Steps.add_on(SignalHandlerAddon),
        signal_save_path=str(tmp_path / "state"),
        signal_log_path=str(tmp_path / "log.txt"),
    )
    trainer.run(1, problem.batches)
    assert (trainer.signal_save_path, trainer.signal_log_path) == (tmp_path / "state", tmp_path / "log.txt")


class Noting(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.run: Run | None = None

    def start(self, run: Run) -> None:
        self.run = run

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self.rows.append((step, dict(values)))

    def finish(self, status: str) -> None:
        pass


def test_web_loggers_accept_the_settings_of_zae(problem: Problem) -> None:
    trainer = zae(
        problem,
        Steps.add_on(WandBLoggerAddon, NeptuneLoggerAddon),
        web_logger={
            "wandb": {"project": "digits", "config": {"a": 1, "b": {"c": 2}}},
            "neptune": {"project_name": "team/digits", "api_tkn": "secret"},
        },
    )
    neptune, wandb = trainer.tracker.loggers
    assert isinstance(neptune, NeptuneLogger)
    assert isinstance(wandb, WandBLogger)
    assert (neptune.project, neptune.api_token, wandb.project, wandb.options) == ("team/digits", "secret", "digits", {})
    assert trainer.tracker.hyperparameters == {"a": 1, "b": {"c": 2}}


def test_web_loggers_track_every_training_step_once(problem: Problem) -> None:
    settings: dict[str, Any] = {"wandb": {}, "neptune": {}}
    trainer = zae(problem, Steps.add_on(WandBLoggerAddon, NeptuneLoggerAddon), web_logger=settings)
    logger = Noting()
    trainer.tracker.loggers = (logger,)
    trainer.run(1, problem.batches[:3], problem.batches[:2])
    steps = [(step, values["loss"]) for step, values in logger.rows if "loss" in values]
    assert [step for step, _ in steps] == [1, 2, 3]
    assert [float(loss) for _, loss in steps] == trainer.get_loss_history()
    with pytest.warns(UserWarning, match="logging: no run is open"):
        trainer.logging({"loss": 0.5})
    assert trainer.log_train["loss"][-1] == 0.5


def test_an_access_to_the_run_of_zae_suggests_the_tracker(problem: Problem) -> None:
    trainer = zae(problem, Steps.add_on(WandBLoggerAddon), web_logger={"wandb": {}})
    with pytest.raises(AttributeError, match=r"no attribute 'web_logger': write trainer.tracker.log"):
        _ = trainer.web_logger


def test_the_wandb_settings_must_be_hyperparameters_by_name(problem: Problem) -> None:
    with pytest.raises(ConfigError, match=r"wandb: config: expected hyperparameters by name, got 'file.yaml'"):
        zae(problem, Steps.add_on(WandBLoggerAddon), web_logger={"wandb": {"config": "file.yaml"}})


def test_a_chain_of_schedulers_steps_on_batches(problem: Problem) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    chain = SchedulerChain(
        WarmUpScheduler(optimizer, total_iters=4, eta_min=0.0), CosineAnnealingScheduler(optimizer, 8, eta_min=0.0)
    )
    trainer = Steps(model, "cpu", "train", optimizer, chain, log_bar=False, scheduler_step_on_batch=True)
    rates = []
    trainer.run(1, problem.batches[: chain.next_iters[0]])
    rates.append(optimizer.param_groups[0]["lr"])
    trainer.run(1, problem.batches[:8])
    rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0, 0.0])
    assert trainer.scheduler is chain


def test_a_user_scheduler_defines_get_lr(problem: Problem) -> None:
    class Halving(SchedulerBase):
        def __init__(self, optimizer: Any, total_iters: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
            super().__init__(optimizer, total_iters, eta_min, last_epoch)

        def get_lr(self) -> list[Any]:
            return [rate * 0.5**self.last_epoch for rate in self.base_lrs]

    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Steps(model, "cpu", "train", optimizer, Halving(optimizer, 10), log_bar=False)
    trainer.run(3, problem.batches)
    assert optimizer.param_groups[0]["lr"] == 0.125


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
        loss: Any = nn.functional.cross_entropy(theirs(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("of_trainer", [False, True])
def test_a_progress_checker_counts_from_one(problem: Problem, of_trainer: bool) -> None:
    checker = ProgressChecker(zae(problem).context) if of_trainer else ProgressChecker()
    assert (checker.get_step(), checker.get_epoch()) == (1, 1)
    checker.update_step()
    checker.update_epoch()
    assert (checker.get_step(), checker.get_epoch()) == (2, 2)
    checker.set_epoch(7)
    assert checker.get_epoch() == 7
    checker.init_state()
    assert (checker.get_step(), checker.get_epoch()) == (1, 1)
