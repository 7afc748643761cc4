"""plato's names and module paths: what its document and its users' code rely on."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand, weights
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from dovetail.callbacks import CallbackHandler, GradientClipping, TrainerCallback
from dovetail.compat.plato import ComposableTrainer, Trainer
from dovetail.errors import ConfigError
from dovetail.trainers import AMPTrainer, AutoBatchTrainer, DDPTrainer, TimedTrainer, TrainerDecorator, registry
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    CompositeLossStrategy,
    CrossEntropyLossStrategy,
    DefaultTrainingStepStrategy,
    GradientClippingOptimizerStrategy,
    L2RegularizationStrategy,
    LRSchedulerStrategy,
    MSELossStrategy,
    NoOpUpdateStrategy,
    NoSchedulerStrategy,
    ReduceLROnPlateauSchedulerStrategy,
    SGDOptimizerStrategy,
    StepLRSchedulerStrategy,
    Strategy,
    TrainingContext,
    TrainingStepStrategy,
)

CONFIG = {"epochs": 2, "batch_size": 8, "lr": 0.1}


@pytest.fixture
def trainset(problem: Problem) -> TensorDataset:
    return TensorDataset(problem.x, problem.y)


def composable(model: Any, **options: Any) -> ComposableTrainer:
    return ComposableTrainer(model, device="cpu", verbose=False, **options)


# ------------------------------------------------------------------ module paths

PATHS = [
    ("trainers.base", "Trainer"),
    ("trainers.basic", "Trainer"),
    ("trainers.composable", "ComposableTrainer"),
    ("trainers.registry", "get"),
    ("trainers.tracking", "LossTracker"),
    ("trainers.tracking", "RunHistory"),
    ("trainers.strategies", "TrainingContext"),
    ("trainers.strategies.algorithms", "FedProxLossStrategy"),
    ("trainers.strategies.algorithms", "FedDynLossStrategy"),
    ("trainers.strategies.algorithms", "SCAFFOLDUpdateStrategy"),
    ("trainers.strategies.base", "TrainingContext"),
    ("trainers.strategies.base", "Strategy"),
    ("trainers.strategies.data_loader", "PrefetchDataLoaderStrategy"),
    ("trainers.strategies.loss_criterion", "CrossEntropyLossStrategy"),
    ("trainers.strategies.lr_scheduler", "StepLRSchedulerStrategy"),
    ("trainers.strategies.model_update", "NoOpUpdateStrategy"),
    ("trainers.strategies.optimizer", "AdamOptimizerStrategy"),
    ("trainers.strategies.testing", "DefaultTestingStrategy"),
    ("trainers.strategies.training_step", "GradientAccumulationStepStrategy"),
    ("callbacks.handler", "CallbackHandler"),
    ("callbacks.trainer", "TrainerCallback"),
]


@pytest.mark.parametrize(("path", "name"), [pytest.param(*each, id=".".join(each)) for each in PATHS])
def test_a_path_of_plato_can_be_imported_in_place_and_in_compat(path: str, name: str) -> None:
    in_place = getattr(importlib.import_module(f"dovetail.{path}"), name)
    assert getattr(importlib.import_module(f"dovetail.compat.plato.{path}"), name) is in_place


# ------------------------------------------------------------------ attributes of the trainer

GIVEN: dict[str, Any] = {
    "loss_strategy": CrossEntropyLossStrategy(label_smoothing=0.1),
    "optimizer_strategy": AdamOptimizerStrategy(lr=0.01),
    "training_step_strategy": DefaultTrainingStepStrategy(),
    "lr_scheduler_strategy": StepLRSchedulerStrategy(step_size=1),
    "model_update_strategy": NoOpUpdateStrategy(),
}


def test_strategies_are_attributes(problem: Problem) -> None:
    trainer = composable(problem.model(), **GIVEN)
    assert {name: getattr(trainer, name) for name in GIVEN} == GIVEN
    defaults = composable(problem.model())
    names = [*GIVEN, "data_loader_strategy", "testing_strategy"]
    assert all(isinstance(getattr(defaults, name), Strategy) for name in names)


def test_an_assigned_strategy_is_used_in_the_next_run(problem: Problem, trainset: TensorDataset) -> None:
    changed, made = (
        composable(problem.model()),
        composable(problem.model(), optimizer_strategy=SGDOptimizerStrategy(lr=0.5)),
    )
    changed.optimizer_strategy = SGDOptimizerStrategy(lr=0.5)
    for trainer in (changed, made):
        trainer.train_model(CONFIG, trainset)
    assert_same_weights(changed.model, made.model)


def test_the_callback_handler_belongs_to_the_trainer(problem: Problem, trainset: TensorDataset) -> None:
    started: list[str] = []

    class Watch(TrainerCallback):
        def on_train_run_start(self, trainer: Any, config: Any, **kwargs: Any) -> None:
            started.append(type(trainer).__name__)

    class Own(ComposableTrainer):
        def train_run_start(self, config: Any) -> None:
            started.append("method")

    trainer = Own(problem.model(), device="cpu", verbose=False)
    assert isinstance(trainer.callback_handler, CallbackHandler)
    trainer.callback_handler.add_callback(Watch)
    assert trainer.callback_handler.callback_list[-1:] == ["Watch"]
    trainer.callback_handler.call_event("on_train_run_start", trainer, {})
    trainer.train_model(CONFIG, trainset)
    trainer.callback_handler.clear_callbacks()
    trainer.train_model(CONFIG, trainset)
    assert started == ["Own", "method", "Own", "method"]


def test_the_scheduler_and_the_round_are_attributes(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(problem.model(), lr_scheduler_strategy=StepLRSchedulerStrategy(step_size=1, gamma=0.5))
    assert not trainer.lr_scheduler
    trainer.current_round = 7
    trainer.train_model(CONFIG, trainset)
    assert trainer.lr_scheduler.get_last_lr() == [0.1 * 0.5**2]
    assert trainer.context.current_round == trainer.current_round == 7
    assert torch.equal(trainer.zeros([2, 3]), torch.zeros(2, 3))


@pytest.mark.parametrize(
    "given", [{"filename": "m.pth", "location": "there"}, {"filename": "m.pth"}, {"location": "there"}, {}]
)
def test_a_model_is_saved_and_loaded_by_name_and_folder(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = composable(problem.model(0)), composable(problem.model(1))
    path = first.save_model(**given)
    folder = given.get("location", "" if "filename" in given else "checkpoint")
    assert path == Path(folder) / given.get("filename", "model.pth")
    second.load_model(given.get("filename"), given.get("location"))
    assert_same_weights(first.model, second.model)


def test_the_registry_returns_a_trainer_for_a_model(problem: Problem) -> None:
    model = problem.model()
    made = registry.get(model=model, callbacks=[], verbose=False)
    assert type(made) is registry.get("basic") is Trainer
    assert made.model is model
    assert isinstance(registry.get("composable", model=model, verbose=False), ComposableTrainer)
    with pytest.raises(ConfigError, match="give the name of a trainer"):
        registry.get()


@pytest.mark.parametrize("kind", [Trainer, ComposableTrainer])
def test_an_empty_selection_trains_nothing_and_warns(
    problem: Problem, trainset: TensorDataset, kind: type[Trainer]
) -> None:
    trainer = kind(problem.model(), device="cpu", verbose=False)
    before = weights(trainer.model)
    with pytest.warns(UserWarning, match="the training data is empty"):
        trainer.train_model(CONFIG, trainset, [])
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer.model).items())


def test_a_subclass_sets_its_strategies_up_and_tears_them_down(problem: Problem) -> None:
    events: list[str] = []

    class Own(ComposableTrainer):
        def _setup_strategies(self) -> None:
            events.append("setup")
            super()._setup_strategies()

        def _teardown_strategies(self) -> None:
            events.append("teardown")
            super()._teardown_strategies()

    with Own(problem.model(), verbose=False) as trainer:
        assert trainer.strategies.is_set_up
    assert events == ["setup", "teardown"]
    assert not trainer.strategies.is_set_up


def test_overridden_methods_equal_strategies(problem: Problem, trainset: TensorDataset) -> None:
    class Own(Trainer):
        def get_loss_criterion(self) -> Any:
            return nn.CrossEntropyLoss(label_smoothing=0.1)

        def get_optimizer(self, model: nn.Module) -> Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.2)

        def get_lr_scheduler(self, config: Mapping[str, Any], optimizer: Optimizer) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)

        def get_train_loader(self, batch_size: int, trainset: Any, sampler: Any = None) -> Any:
            return DataLoader(trainset, batch_size=2 * batch_size, sampler=sampler)

    own = Own(problem.model(), device="cpu", verbose=False)
    given = composable(
        problem.model(),
        loss_strategy=CrossEntropyLossStrategy(label_smoothing=0.1),
        optimizer_strategy=SGDOptimizerStrategy(lr=0.2),
        lr_scheduler_strategy=StepLRSchedulerStrategy(step_size=1),
    )
    own.train_model(CONFIG, trainset, SequentialSampler(trainset))
    given.train_model({**CONFIG, "batch_size": 16}, trainset, SequentialSampler(trainset))
    assert_same_weights(own.model, given.model)
    assert list(own.history.losses) == list(given.history.losses)


# ------------------------------------------------------------------ strategies and their context


class ConstantRate(LRSchedulerStrategy):
    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> None:
        return None


@pytest.mark.parametrize(
    "strategy", [ConstantRate(), StepLRSchedulerStrategy(), ReduceLROnPlateauSchedulerStrategy(), NoSchedulerStrategy()]
)
def test_a_scheduler_step_without_a_scheduler_does_nothing(strategy: LRSchedulerStrategy) -> None:
    context = TrainingContext()
    strategy.step(None, context)
    assert context.schedulers == []


def test_a_composite_loss_exposes_its_parts_and_weights() -> None:
    first, second = MSELossStrategy(), L2RegularizationStrategy()
    assert CompositeLossStrategy([first, (second, 0.1)]).strategies == [(first, 1.0), (second, 0.1)]


def test_a_context_can_be_filled_and_shown() -> None:
    context = TrainingContext()
    context.model, context.device = nn.Linear(2, 1), torch.device("cpu")
    context.client_id, context.current_epoch, context.current_round = 4, 3, 7
    context.config, context.state = {"lr": 0.1}, {"shared": 1}
    assert (context.client_id, context.current_epoch, context.current_round) == (4, 3, 7)
    shown = "TrainingContext(client_id=4, current_epoch=3, current_round=7, model=Linear, device=cpu)"
    assert repr(context) == shown


def test_the_epoch_of_a_running_loop_cannot_be_set(problem: Problem, trainset: TensorDataset) -> None:
    class Setting(NoOpUpdateStrategy):
        def before_step(self, context: TrainingContext) -> None:
            context.current_epoch = 5

    with pytest.raises(ConfigError, match="the loop counts the epochs"):
        composable(problem.model(), model_update_strategy=Setting()).train_model(CONFIG, trainset)


# ------------------------------------------------------------------ steps that make their updates themselves


class OwnStep(TrainingStepStrategy):
    """A step as plato's users write it."""

    def training_step(
        self, model: Any, optimizer: Any, examples: Any, labels: Any, loss_criterion: Any, context: Any
    ) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = loss_criterion(model(examples), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss


class HalfOwnStep(TrainingStepStrategy):
    """A step that differentiates through the context and updates without it."""

    def training_step(
        self, model: Any, optimizer: Any, examples: Any, labels: Any, loss_criterion: Any, context: TrainingContext
    ) -> Tensor:
        loss: Tensor = loss_criterion(model(examples), labels)
        context.backward(loss)
        optimizer.step()
        return loss


def momentum() -> SGDOptimizerStrategy:
    return SGDOptimizerStrategy(lr=0.1, momentum=0.9)


@pytest.mark.parametrize("step", [OwnStep, HalfOwnStep])
@pytest.mark.parametrize("layer", [None, TimedTrainer, DDPTrainer])
def test_a_step_that_calls_the_optimizer_equals_a_hand_written_loop(
    problem: Problem, trainset: TensorDataset, layer: Any, step: type[TrainingStepStrategy]
) -> None:
    by_hand = problem.model()
    losses = train_by_hand(by_hand, problem.batches, torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9), 2)
    updates: list[int] = []

    class Count(NoOpUpdateStrategy):
        def after_step(self, context: TrainingContext) -> None:
            updates.append(context.progress.updates)

    trainer = composable(
        problem.model(), optimizer_strategy=momentum(), training_step_strategy=step(), model_update_strategy=Count()
    )
    (trainer if layer is None else layer(trainer)).train_model(CONFIG, trainset)
    assert_same_weights(trainer.model, by_hand)
    assert trainer.history.losses == pytest.approx(losses)
    assert updates == list(range(1, 25))


class Doubled(TrainerDecorator):
    def optimizer_step(self, optimizer: Optimizer) -> bool:
        super().optimizer_step(optimizer)
        return super().optimizer_step(optimizer)


class SeveralOptimizers(ComposableTrainer):
    def get_optimizer(self, model: nn.Module) -> list[Optimizer]:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]


UNUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulation_steps": (None, {"accumulation_steps": 2}),
    "gradient_clip": (None, {"gradient_clip": 1.0}),
    "a strategy or callback that changes gradients": (
        None,
        {"optimizer_strategy": GradientClippingOptimizerStrategy(momentum(), max_norm=1.0)},
    ),
    "precision='fp16'": (lambda trainer: AMPTrainer(trainer, precision="fp16"), {}),
    "more than one optimizer": (None, {}),
    "Doubled.optimizer_step": (Doubled, {}),
    "AutoBatch": (AutoBatchTrainer, {}),
}


@pytest.mark.parametrize("setting", UNUSED)
def test_a_step_that_calls_the_optimizer_names_the_bypassed_setting(
    problem: Problem, trainset: TensorDataset, setting: str
) -> None:
    layer, options = UNUSED[setting]
    kind = SeveralOptimizers if setting == "more than one optimizer" else ComposableTrainer
    trainer: Any = kind(problem.model(), device="cpu", verbose=False, training_step_strategy=OwnStep(), **options)
    with pytest.raises(ConfigError, match=r"context\.backward") as raised, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (trainer if layer is None else layer(trainer)).fit(trainset)
    assert setting in str(raised.value)


def test_a_bypassed_clipping_callback_is_named_too(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(problem.model(), training_step_strategy=OwnStep(), callbacks=[GradientClipping(1.0)])
    with pytest.raises(ConfigError, match=r"changes gradients.*context\.step"):
        trainer.fit(trainset)


def test_a_whole_step_may_call_the_overridden_one(problem: Problem, trainset: TensorDataset) -> None:
    losses: list[float] = []

    class Own(Trainer):
        def perform_forward_and_backward_passes(self, config: Any, examples: Any, labels: Any) -> Any:
            losses.append(self._loss_criterion(self.model(examples), labels).item())
            return super().perform_forward_and_backward_passes(config, examples, labels)

    own, plain = (kind(problem.model(), device="cpu", verbose=False, gradient_clip=0.1) for kind in (Own, Trainer))
    for trainer in (own, plain):
        trainer.train_model(CONFIG, trainset)
    assert_same_weights(own.model, plain.model)
    assert losses == pytest.approx(list(own.history.losses))
