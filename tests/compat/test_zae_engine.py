"""zae-engine's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, weights
from torch import nn

from dovetail.compat.zae_engine import ProgressChecker, Trainer
from dovetail.errors import ConfigError


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
    assert [float(loss) for loss in trainer.log_train["loss"]] == trainer.get_loss_history()[12:]
    assert len(trainer.log_test["loss"]) == len(trainer.log_test["output"]) == 3
    assert trainer.get_loss_history("train") == trainer.get_loss_history()
    assert trainer.get_loss_history("test") == trainer.history.get_metric_values("valid_loss")


def test_metrics_of_an_epoch_come_from_its_logs(problem: Problem) -> None:
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
        loss: Any = nn.functional.cross_entropy(theirs(x), y)
        loss.backward()
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
