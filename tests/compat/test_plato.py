"""plato's names."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights
from torch import nn

from dovetail import Batches, Epochs
from dovetail import trainers as main
from dovetail.callbacks import TrainerCallback
from dovetail.compat import zae_engine
from dovetail.compat.plato import ComposableTrainer, Trainer
from dovetail.errors import ConfigError
from dovetail.trainers import AMPTrainer, TrainingContext, basic, composable
from dovetail.trainers.reuse import reset
from dovetail.trainers.strategies import MultipleForwardPassStepStrategy, TestingStrategy


def quiet(model: Any, **options: Any) -> Trainer:
    return Trainer(model, verbose=False, **options)


def test_hook_methods_run_before_callbacks_with_the_arguments_of_plato(problem: Problem) -> None:
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
    losses = [round(loss, 6) for loss in trainer.history.losses]
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
def test_an_unreferenced_trainer_is_garbage_collected(problem: Problem, runs: bool) -> None:
    class Hooked(zae_engine.Trainer, Trainer):
        def train_epoch_end(self, config: Mapping[str, Any]) -> None:
            pass

    trainer = Hooked(problem.model(), verbose=False)
    if runs:
        trainer.run(1, problem.batches, problem.batches)
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None


def test_a_run_over_a_train_set_starts_from_the_beginning(problem: Problem) -> None:
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


def test_a_testing_strategy_is_used_through_every_layer(problem: Problem) -> None:
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
        optimizer = self.context.optimizers[0]
        optimizer.zero_grad()
        loss = self.criterion(self.model(examples), labels)
        loss.backward()
        optimizer.step()
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
def test_a_whole_step_that_ignores_an_option_is_an_error(problem: Problem, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"makes its updates itself, so {name} would have no effect"):
        WholeStep(problem.model(), "cpu", verbose=False, **options).fit(problem.batches, max_length=Epochs(1))


def test_a_whole_step_through_the_context_applies_every_option(problem: Problem) -> None:
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
    reset(trainer)
    assert trainer.current_epoch == 1


def test_the_current_epoch_is_kept_after_an_error(problem: Problem) -> None:
    def fail(trainer: Any, batch: Any) -> Any:
        raise ZeroDivisionError

    trainer = quiet(problem.model(), train_step=fail)
    trainer.context.progress.epoch = 2
    with pytest.raises(ZeroDivisionError):
        trainer.fit(problem.batches, max_length=Epochs(3))
    assert trainer.current_epoch == 2


def test_client_ids_and_aliases_are_readable(problem: Problem) -> None:
    trainer = quiet(problem.model())
    trainer.set_client_id(4)
    assert trainer.client_id == trainer.context.client_id == 4
    assert trainer.current_epoch == 1
    assert main.SingleProcess is main.Trainer
    assert basic.Trainer is Trainer
    assert composable.ComposableTrainer is ComposableTrainer


def test_a_trainer_may_have_the_names_of_two_libraries(problem: Problem) -> None:
    class Both(zae_engine.Trainer, Trainer):
        ends = 0

        def train_epoch_end(self, config: Mapping[str, Any]) -> None:
            self.ends += 1

    both = Both(problem.model(), verbose=False, seed=0)
    both.run(2, problem.batches)
    plain = main.Trainer(problem.model(), verbose=False, seed=0)
    plain.fit(problem.batches, max_length=Epochs(2))
    assert both.ends == both.current_epoch == 2
    assert_same_weights(both.model, plain.model)


def test_outputs_are_processed_before_predict_returns_them(problem: Problem) -> None:
    class Reversed(Trainer):
        def process_outputs(self, outputs: Any) -> Any:
            return outputs.flip(1)

    model = problem.model()
    plain, ours = quiet(model).predict(problem.x), Reversed(model, verbose=False).predict(problem.x)
    assert torch.equal(ours, plain.flip(1))


@pytest.mark.parametrize("wrapped", [False, True])
def test_train_calls_an_overridden_training_method(problem: Problem, wrapped: bool) -> None:
    class Own(Trainer):
        def train_model(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> None:
            seen.append((config["epochs"], sampler))
            super().train_model({**config, "epochs": 1}, trainset, sampler)

    seen: list[Any] = []
    inner = Own(problem.model(), num_epochs=5, verbose=False)
    trainer: Any = AMPTrainer(inner, precision="fp32") if wrapped else inner
    trainer.train(problem.batches)
    assert seen == [(5, None)]
    assert inner.sampler is None
    assert inner.context.progress.epoch == 1
