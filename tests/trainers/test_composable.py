"""The composable trainer through its public names: the areas that its specification lists."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

from dovetail import Epochs
from dovetail.callbacks import Callback, TrainerCallback
from dovetail.errors import CheckpointError, ConfigError, UnknownNameError
from dovetail.trainers import AMPTrainer, DDPTrainer, basic
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    CosineAnnealingLRSchedulerStrategy,
    CrossEntropyLossStrategy,
    DataLoaderStrategy,
    DefaultDataLoaderStrategy,
    DefaultLossCriterionStrategy,
    DefaultOptimizerStrategy,
    DefaultTestingStrategy,
    DefaultTrainingStepStrategy,
    GradientAccumulationStepStrategy,
    LossCriterionStrategy,
    LRSchedulerStrategy,
    ModelUpdateStrategy,
    MSELossStrategy,
    NoOpUpdateStrategy,
    NoSchedulerStrategy,
    OptimizerStrategy,
    ReduceLROnPlateauSchedulerStrategy,
    SGDOptimizerStrategy,
    StateTrackingUpdateStrategy,
    StepLRSchedulerStrategy,
    Strategy,
    TestingStrategy,
    TrainingStepStrategy,
)

composable = partial(ComposableTrainer, device="cpu", verbose=False)

CONFIG = {"epochs": 2, "batch_size": 8, "lr": 0.1}


@pytest.fixture
def trainset(problem: Problem) -> TensorDataset:
    return TensorDataset(problem.x, problem.y)


# ------------------------------------------------------------------ initialisation

KINDS: dict[str, Callable[[], Strategy]] = {
    "loss": CrossEntropyLossStrategy,
    "optimizer": partial(AdamOptimizerStrategy, lr=0.001),
    "training_step": DefaultTrainingStepStrategy,
    "lr_scheduler": partial(CosineAnnealingLRSchedulerStrategy, T_max=50),
    "model_update": NoOpUpdateStrategy,
    "data_loader": DefaultDataLoaderStrategy,
    "testing": DefaultTestingStrategy,
}

DEFAULTS = {
    "loss": DefaultLossCriterionStrategy,
    "optimizer": DefaultOptimizerStrategy,
    "training_step": DefaultTrainingStepStrategy,
    "lr_scheduler": NoSchedulerStrategy,
    "model_update": NoOpUpdateStrategy,
    "data_loader": DefaultDataLoaderStrategy,
    "testing": DefaultTestingStrategy,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_strategy_is_kept(problem: Problem, kind: str) -> None:
    strategy = KINDS[kind]()
    trainer = composable(model=problem.model(), **{f"{kind}_strategy": strategy})
    assert getattr(trainer.strategies, kind) is strategy


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_strategy_has_its_default(problem: Problem, kind: str) -> None:
    assert type(getattr(composable(model=problem.model()).strategies, kind)) is DEFAULTS[kind]


def test_arguments_come_in_the_specified_order(problem: Problem) -> None:
    strategies = [make() for make in KINDS.values()]
    trainer = ComposableTrainer(problem.model(), [], *strategies, verbose=False)
    assert list(trainer.strategies) == strategies


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_class_is_instantiated(problem: Problem, kind: str) -> None:
    trainer = composable(model=problem.model(), **{f"{kind}_strategy": DEFAULTS[kind]})
    assert type(getattr(trainer.strategies, kind)) is DEFAULTS[kind]


def test_a_model_may_be_a_class_or_a_factory(problem: Problem) -> None:
    assert_same_weights(composable(model=problem.model).model, problem.model())


def test_a_trainer_may_receive_its_model_later(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(optimizer_strategy=AdamOptimizerStrategy(lr=0.001))
    trainer.model = problem.model()
    trainer.train_model(CONFIG, trainset)
    assert trainer.context.progress.epoch == 2


# ------------------------------------------------------------------ training


def test_default_strategies_train_as_the_plain_loop(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model())
    trainer.train_model(CONFIG, trainset)
    expected = problem.model()
    train_by_hand(expected, problem.batches, torch.optim.SGD(expected.parameters(), lr=0.1), epochs=2)
    assert_same_weights(trainer.model, expected)


def test_the_loss_falls_from_epoch_to_epoch(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model(), optimizer_strategy=AdamOptimizerStrategy(lr=0.01))
    trainer.train_model({**CONFIG, "epochs": 5}, trainset)
    losses = trainer.history.get_metric_values("train_loss")
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_every_train_model_call_is_a_separate_run(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model())
    for _ in range(2):
        trainer.train_model(CONFIG, trainset)
        assert trainer.context.progress.updates == 24


def test_a_sampler_chooses_the_samples(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model())
    trainer.train_model(CONFIG, trainset, sampler=range(40))
    assert trainer.context.progress.records == 80


def test_train_returns_seconds(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model(), num_epochs=1, batch_size=8)
    assert trainer.train(trainset) > 0
    assert trainer.context.progress.updates == 12


def test_accumulation_over_ten_batches_makes_three_updates(problem: Problem) -> None:
    class Counts(SGDOptimizerStrategy):
        def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
            heard.append(context.progress.updates)

    heard: list[int] = []
    trainer = composable(
        model=problem.model(),
        optimizer_strategy=Counts(lr=0.1),
        training_step_strategy=GradientAccumulationStepStrategy(accumulation_steps=4),
    )
    trainer.fit(problem.batches[:10], max_length=Epochs(1))
    assert heard == [1, 2, 3]


def test_a_plateau_receives_the_validation_metric(problem: Problem) -> None:
    class Observed(ReduceLROnPlateauSchedulerStrategy):
        def step(self, scheduler: Any, context: TrainingContext) -> None:
            super().step(scheduler, context)
            seen.append(context.run.validation["valid_loss"])
            assert scheduler.best == min(seen)

    seen: list[float] = []
    trainer = composable(model=problem.model(), lr_scheduler_strategy=Observed())
    trainer.fit(problem.batches, problem.batches[:4], max_length=Epochs(3))
    assert seen == trainer.history.get_metric_values("valid_loss")


# ------------------------------------------------------------------ testing


def test_test_returns_the_accuracy(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model())
    expected = (trainer.model(problem.x).argmax(dim=1) == problem.y).float().mean().item()
    assert trainer.test(trainset) == pytest.approx(expected)
    assert trainer.test_model(CONFIG, trainset) == pytest.approx(expected)


def test_a_testing_strategy_defines_the_returned_score(problem: Problem, trainset: TensorDataset) -> None:
    class Sizes(TestingStrategy):
        def test_model(self, model: Any, config: Any, testset: Any, sampler: Any, context: Any) -> float:
            assert not model.training
            return float(len(testset))

    assert composable(model=problem.model(), testing_strategy=Sizes()).test(trainset) == 96.0


# ------------------------------------------------------------------ strategies are called in the documented order


class Recorder:
    """Every strategy of one trainer, writing down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        note = self.calls.append

        class Loss(LossCriterionStrategy):
            def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
                note("compute_loss")
                return functional.cross_entropy(outputs, labels)

        class Optimizers(OptimizerStrategy):
            def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
                note("create_optimizer")
                return torch.optim.SGD(model.parameters(), lr=0.1)

            def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
                note("on_optimizer_step")

        class Step(TrainingStepStrategy):
            def training_step(
                self, model: Any, optimizer: Any, examples: Any, labels: Any, loss_criterion: Any, context: Any
            ) -> Tensor:
                note("training_step")
                loss: Tensor = loss_criterion(model(examples), labels)
                return loss

        class Schedule(LRSchedulerStrategy):
            def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> LRScheduler:
                note("create_scheduler")
                return StepLR(optimizer, 1)

            def step(self, scheduler: Any, context: TrainingContext) -> None:
                note("scheduler step")
                scheduler.step()

        class Updates(ModelUpdateStrategy):
            def on_train_start(self, context: TrainingContext) -> None:
                note("on_train_start")

            def before_step(self, context: TrainingContext) -> None:
                note("before_step")

            def after_step(self, context: TrainingContext) -> None:
                note("after_step")

            def on_train_end(self, context: TrainingContext) -> None:
                note("on_train_end")

        class Loader(DataLoaderStrategy):
            def create_train_loader(self, trainset: Any, sampler: Any, batch_size: int, context: Any) -> Any:
                note("create_train_loader")
                return DefaultDataLoaderStrategy().create_train_loader(trainset, sampler, batch_size, context)

        self.strategies = {
            "loss_strategy": Loss(),
            "optimizer_strategy": Optimizers(),
            "training_step_strategy": Step(),
            "lr_scheduler_strategy": Schedule(),
            "model_update_strategy": Updates(),
            "data_loader_strategy": Loader(),
        }


def test_an_epoch_calls_the_strategies_in_the_documented_order(problem: Problem, trainset: TensorDataset) -> None:
    recorder = Recorder()
    trainer = composable(model=problem.model(), **recorder.strategies)
    trainer.train_model({"epochs": 1, "batch_size": 48}, trainset)
    batch = ["before_step", "training_step", "compute_loss", "on_optimizer_step", "after_step"]
    made = {"on_train_start", "create_train_loader", "create_optimizer", "create_scheduler"}
    calls = [call for call in recorder.calls if call not in made]
    assert calls == [*batch, *batch, "scheduler step", "on_train_end"]


def test_everything_is_built_once_before_the_first_batch(problem: Problem, trainset: TensorDataset) -> None:
    recorder = Recorder()
    composable(model=problem.model(), **recorder.strategies).train_model(CONFIG, trainset)
    made = recorder.calls[: recorder.calls.index("before_step")]
    assert sorted(made) == ["create_optimizer", "create_scheduler", "create_train_loader", "on_train_start"]
    assert made.index("create_optimizer") < made.index("create_scheduler")


# ------------------------------------------------------------------ context


def test_the_context_holds_the_values_of_the_run(problem: Problem, trainset: TensorDataset) -> None:
    class Looks(ModelUpdateStrategy):
        def after_step(self, context: TrainingContext) -> None:
            found.append(
                {
                    "model": context.model,
                    "device": context.device,
                    "client_id": context.client_id,
                    "epochs": context.config["epochs"],
                    "epoch": context.current_epoch,
                    "batch": context.state["current_batch"],
                }
            )

    found: list[dict[str, Any]] = []
    trainer = composable(model=problem.model(), model_update_strategy=Looks())
    trainer.set_client_id(7)
    trainer.train_model(CONFIG, trainset)
    known = {"model": trainer.model, "device": torch.device("cpu"), "client_id": 7, "epochs": 2}
    assert found == [{**known, "epoch": epoch, "batch": batch} for epoch in (1, 2) for batch in range(12)]


def test_the_context_state_holds_the_documented_keys(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model(), seed=3)
    trainer.train_model(CONFIG, trainset)
    state = trainer.context.state
    assert state["train_loader"] is trainer.train_loader
    assert state["current_batch"] == 11
    assert state["last_loss"].item() == trainer.history.losses[-1]
    assert state["order_seed"] == 3


def test_strategies_share_values_through_the_context_state(problem: Problem, trainset: TensorDataset) -> None:
    class Reporter(ModelUpdateStrategy):
        def before_step(self, context: TrainingContext) -> None:
            context.state["weight"] = context.current_epoch - 1

    class Receiver(CrossEntropyLossStrategy):
        def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
            return context.state["weight"] * super().compute_loss(outputs, labels, context)

    trainer = composable(model=problem.model(), model_update_strategy=Reporter(), loss_strategy=Receiver())
    trainer.train_model(CONFIG, trainset)
    assert trainer.history.losses[:12].tolist() == [0.0] * 12
    assert all(loss > 0 for loss in trainer.history.losses[12:])


# ------------------------------------------------------------------ callbacks


def test_callbacks_of_both_spellings_are_called(problem: Problem, trainset: TensorDataset) -> None:
    class Mine(Callback):
        def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
            heard.append(f"mine {context.progress.epoch}")

    class Platos(TrainerCallback):
        def on_train_epoch_end(self, trainer: Any, config: Any, **kwargs: Any) -> None:
            heard.append(f"plato's {trainer.current_epoch - 1}")

    heard: list[str] = []
    composable(model=problem.model(), callbacks=[Mine, Platos()]).train_model(CONFIG, trainset)
    assert [it.split()[0] for it in heard] == ["mine", "plato's"] * 2


def test_strategies_run_before_callbacks(problem: Problem) -> None:
    class Doubles(ModelUpdateStrategy):
        def after_step(self, context: TrainingContext) -> None:
            context.state["number"] = 2 * context.progress.updates

    class Looks(Callback):
        def on_update(self, context: TrainingContext) -> None:
            seen.append(context.state["number"])

    seen: list[int] = []
    trainer = composable(model=problem.model(), callbacks=[Looks()], model_update_strategy=Doubles())
    trainer.fit(problem.batches[:3], max_length=Epochs(1))
    assert seen == [2, 4, 6]


# ------------------------------------------------------------------ the model: saved, loaded, sent


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_a_saved_model_is_loaded(problem: Problem, trainset: TensorDataset, tmp_path: Path, name: str) -> None:
    trainer = composable(model=problem.model())
    trainer.train_model(CONFIG, trainset)
    trainer.save_model(tmp_path / name)
    other = composable(model=problem.model(seed=1))
    other.load_model(tmp_path / name)
    assert_same_weights(other.model, trainer.model)


def test_the_update_is_the_state_dict_of_the_trained_model(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model())
    update = trainer.obtain_model_update(CONFIG, trainset, None)
    expected = composable(model=problem.model())
    expected.train_model(CONFIG, trainset)
    assert update.keys() == expected.model.state_dict().keys()
    assert all(torch.equal(update[name], value) for name, value in expected.model.state_dict().items())


def test_the_update_is_a_copy_of_the_weights(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model())
    update = trainer.obtain_model_update(CONFIG, trainset, None)
    before = {name: value.clone() for name, value in update.items()}
    trainer.train_model(CONFIG, trainset)
    assert all(torch.equal(update[name], value) for name, value in before.items())


def test_a_payload_is_sent_beside_the_weights(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model(), model_update_strategy=StateTrackingUpdateStrategy())
    update = trainer.obtain_model_update(CONFIG, trainset, None)
    assert update.keys() == {"model_update", "total_steps", "epoch_steps", "round_number"}
    assert (update["total_steps"], update["epoch_steps"]) == (24, 12)
    assert update["model_update"].keys() == trainer.model.state_dict().keys()


# ------------------------------------------------------------------ edge cases


def test_an_empty_dataset_warns_and_changes_nothing(problem: Problem) -> None:
    trainer = composable(model=problem.model())
    with pytest.warns(UserWarning, match="the training data is empty"):
        trainer.train_model({"epochs": 1, "batch_size": 8}, TensorDataset(problem.x[:0], problem.y[:0]))
    assert_same_weights(trainer.model, problem.model())


@pytest.mark.parametrize("number", [1, 3])
def test_a_single_batch_is_one_update(problem: Problem, number: int) -> None:
    trainer = composable(model=problem.model())
    trainer.train_model({"epochs": 1, "batch_size": 8}, TensorDataset(problem.x[:number], problem.y[:number]))
    assert trainer.context.progress.updates == 1


def test_zero_epochs_train_nothing(problem: Problem, trainset: TensorDataset) -> None:
    trainer = composable(model=problem.model())
    with pytest.warns(UserWarning, match="nothing to train"):
        trainer.train_model({**CONFIG, "epochs": 0}, trainset)
    assert_same_weights(trainer.model, problem.model())


def test_a_custom_step_needs_no_labels(problem: Problem) -> None:
    class Reconstruct(TrainingStepStrategy):
        def training_step(
            self, model: Any, optimizer: Any, examples: Any, labels: Any, loss_criterion: Any, context: Any
        ) -> Tensor:
            assert labels is None
            loss: Tensor = loss_criterion(model(examples), examples)
            return loss

    model = nn.Linear(6, 6)
    trainer = composable(model=model, loss_strategy=MSELossStrategy(), training_step_strategy=Reconstruct())
    trainer.train_model({"epochs": 5, "batch_size": 8}, problem.x)
    losses = trainer.history.get_metric_values("train_loss")
    assert losses[-1] < losses[0]


def test_a_default_step_without_labels_raises_a_clear_error(problem: Problem) -> None:
    with pytest.raises(TypeError, match="NoneType") as caught:
        composable(model=problem.model()).train_model(CONFIG, problem.x)
    assert "the batch has no targets" in caught.value.__notes__[0]


def test_a_composable_trainer_without_a_model_raises_an_error(trainset: TensorDataset) -> None:
    with pytest.raises(ConfigError, match="no model"):
        composable().train_model(CONFIG, trainset)


# ------------------------------------------------------------------ life cycle


class Lives(CrossEntropyLossStrategy):
    """Notes its life cycle."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.fails = fails

    def setup(self, context: TrainingContext) -> None:
        self.heard.append("setup")

    def on_train_start(self, context: TrainingContext) -> None:
        self.heard.append("on_train_start")

    def on_train_end(self, context: TrainingContext) -> None:
        self.heard.append("on_train_end")

    def teardown(self, context: TrainingContext) -> None:
        self.heard.append("teardown")

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        if self.fails:
            raise ArithmeticError("by design")
        return super().compute_loss(outputs, labels, context)


RUN = ["on_train_start", "on_train_end"]


def test_strategies_are_set_up_in_the_constructor(problem: Problem) -> None:
    strategy = Lives()
    trainer = composable(model=problem.model(), loss_strategy=strategy)
    assert strategy.heard == ["setup"]
    trainer.close()


def test_every_run_starts_and_ends_strategies_without_teardown(problem: Problem, trainset: TensorDataset) -> None:
    strategy = Lives()
    trainer = composable(model=problem.model(), loss_strategy=strategy)
    trainer.train_model(CONFIG, trainset)
    trainer.train_model(CONFIG, trainset)
    assert strategy.heard == ["setup", *RUN, *RUN]


def test_a_with_block_tears_strategies_down_at_its_end(problem: Problem, trainset: TensorDataset) -> None:
    strategy = Lives()
    with composable(model=problem.model(), loss_strategy=strategy) as trainer:
        trainer.train_model(CONFIG, trainset)
    assert strategy.heard == ["setup", *RUN, "teardown"]


def test_closing_a_trainer_twice_tears_strategies_down_once(problem: Problem) -> None:
    strategy = Lives()
    with composable(model=problem.model(), loss_strategy=strategy) as trainer:
        trainer.close()
    del trainer
    gc.collect()
    assert strategy.heard == ["setup", "teardown"]


def test_a_garbage_collected_trainer_is_torn_down(problem: Problem, trainset: TensorDataset) -> None:
    strategy = Lives()
    trainer = composable(model=problem.model(), loss_strategy=strategy)
    trainer.train_model(CONFIG, trainset)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
    assert strategy.heard == ["setup", *RUN, "teardown"]


def test_an_error_tears_strategies_down_once_and_is_not_hidden(problem: Problem, trainset: TensorDataset) -> None:
    strategy = Lives(fails=True)
    with (
        pytest.raises(ArithmeticError, match="by design"),
        composable(model=problem.model(), loss_strategy=strategy) as trainer,
    ):
        trainer.train_model(CONFIG, trainset)
    assert strategy.heard == ["setup", "on_train_start", "teardown"]


def test_a_trainer_can_train_again_after_an_error(problem: Problem, trainset: TensorDataset) -> None:
    strategy = Lives(fails=True)
    trainer = composable(model=problem.model(), loss_strategy=strategy)
    with pytest.raises(ArithmeticError):
        trainer.train_model(CONFIG, trainset)
    strategy.fails = False
    trainer.train_model(CONFIG, trainset)
    assert strategy.heard == ["setup", "on_train_start", *RUN]


def test_a_failing_setup_tears_down_the_earlier_strategies(problem: Problem) -> None:
    class Refuses(SGDOptimizerStrategy):
        def setup(self, context: TrainingContext) -> None:
            raise ArithmeticError("by design")

    strategy = Lives()
    with pytest.raises(ArithmeticError, match="by design"):
        composable(model=problem.model(), loss_strategy=strategy, optimizer_strategy=Refuses())
    assert strategy.heard == ["setup", "teardown"]


def test_a_failing_teardown_does_not_stop_the_others(problem: Problem) -> None:
    class Refuses(Lives):
        def teardown(self, context: TrainingContext) -> None:
            raise ArithmeticError("by design")

    class Follows(StateTrackingUpdateStrategy):
        is_down = False

        def teardown(self, context: TrainingContext) -> None:
            self.is_down = True

    follows = Follows()
    trainer = composable(model=problem.model(), loss_strategy=Refuses(), model_update_strategy=follows)
    with pytest.raises(ArithmeticError, match="by design"):
        trainer.close()
    assert follows.is_down


# ------------------------------------------------------------------ plain callables, torch objects and names


def adamw(problem: Problem) -> nn.Module:
    model = problem.model()
    train_by_hand(model, problem.batches, torch.optim.AdamW(model.parameters(), lr=1e-3), epochs=2)
    return model


@pytest.mark.parametrize(
    "loss", [functional.cross_entropy, nn.CrossEntropyLoss(), nn.CrossEntropyLoss, "CrossEntropyLoss"]
)
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.AdamW, lr=1e-3), "AdamW", torch.optim.AdamW], ids=["partial", "name", "class"]
)
def test_torch_losses_and_optimizers_are_accepted(
    problem: Problem, trainset: TensorDataset, loss: Any, optimizer: Any
) -> None:
    trainer = composable(model=problem.model(), loss_strategy=loss, optimizer_strategy=optimizer)
    trainer.train_model({**CONFIG, "lr": 1e-3}, trainset)
    assert_same_weights(trainer.model, adamw(problem))


@pytest.mark.parametrize(
    "schedule",
    [partial(StepLR, step_size=3), lambda optimizer: StepLR(optimizer, 3), StepLRSchedulerStrategy(step_size=3)],
    ids=["partial", "callable", "strategy"],
)
def test_torch_schedulers_are_accepted(problem: Problem, trainset: TensorDataset, schedule: Any) -> None:
    trainer = composable(
        model=problem.model(), optimizer_strategy=SGDOptimizerStrategy(lr=1.0), lr_scheduler_strategy=schedule
    )
    trainer.train_model({**CONFIG, "epochs": 4}, trainset)
    assert trainer.history.get_metric_values("train_lr") == [1.0, 1.0, 1.0, 0.1]


def test_an_optimizer_and_its_scheduler_may_be_objects(problem: Problem) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = composable(model=model, optimizer_strategy=optimizer, lr_scheduler_strategy=StepLR(optimizer, 1))
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert trainer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_steps_updates_loaders_and_tests_may_be_functions(problem: Problem, trainset: TensorDataset) -> None:
    def step(model: Any, optimizer: Any, examples: Any, labels: Any, criterion: Any, context: Any) -> Tensor:
        loss: Tensor = 2 * criterion(model(examples), labels)
        return loss

    seen: list[int] = []
    trainer = composable(
        model=problem.model(),
        optimizer_strategy=SGDOptimizerStrategy(lr=0.05),
        training_step_strategy=step,
        model_update_strategy=lambda context: seen.append(context.progress.updates),
        data_loader_strategy=lambda trainset, sampler, batch_size, context: problem.batches,
        testing_strategy=lambda model, config, testset, sampler, context: 0.5,
    )
    trainer.train_model({"epochs": 1}, trainset)
    expected = problem.model()
    train_by_hand(expected, problem.batches, torch.optim.SGD(expected.parameters(), lr=0.1))
    assert_same_weights(trainer.model, expected)
    assert seen == list(range(1, 13))
    assert trainer.test(trainset) == 0.5


@pytest.mark.parametrize(
    ("argument", "name", "nearest"),
    [
        ("loss_strategy", "CrosEntropyLoss", "CrossEntropyLoss"),
        ("optimizer_strategy", "AdanW", "AdamW"),
        ("lr_scheduler_strategy", "StepLRR", "StepLR"),
        ("training_step_strategy", "DefaultTrainingStep", "DefaultTrainingStepStrategy"),
        ("model_update_strategy", "NoOpUpdate", "NoOpUpdateStrategy"),
        ("data_loader_strategy", "ShuffelDataLoaderStrategy", "ShuffleDataLoaderStrategy"),
        ("testing_strategy", "DefaultTestStrategy", "DefaultTestingStrategy"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(argument: str, name: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{name}.*did you mean '{nearest}'"):
        composable(model=nn.Linear(1, 1), **{argument: name})


@pytest.mark.parametrize("kind", KINDS)
def test_a_strategy_of_the_wrong_kind_is_rejected(kind: str) -> None:
    other: Strategy = MSELossStrategy() if kind != "loss" else NoOpUpdateStrategy()
    with pytest.raises(ConfigError, match=f"{kind}_strategy: expected"):
        composable(model=nn.Linear(1, 1), **{f"{kind}_strategy": other})


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_is_not_a_strategy_is_rejected(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind}_strategy: expected .*, got 3"):
        composable(model=nn.Linear(1, 1), **{f"{kind}_strategy": 3})


# ------------------------------------------------------------------ basic.Trainer takes the same arguments


def test_the_basic_trainer_accepts_strategies(problem: Problem, trainset: TensorDataset) -> None:
    strategies = Recorder().strategies
    trainer = basic.Trainer(problem.model(), "cpu", verbose=False, **strategies)
    other = composable(model=problem.model(), **Recorder().strategies)
    for each in (trainer, other):
        each.train_model(CONFIG, trainset)
    assert_same_weights(trainer.model, other.model)


def test_one_strategy_does_not_change_the_others_of_the_basic_trainer(problem: Problem) -> None:
    plain = basic.Trainer(problem.model(), "cpu", verbose=False, seed=0)
    with_one = basic.Trainer(problem.model(), "cpu", verbose=False, seed=0, loss_strategy=functional.cross_entropy)
    for each in (plain, with_one):
        each.fit((problem.x, problem.y), max_length=Epochs(1))
    assert_same_weights(with_one.model, plain.model)


@pytest.mark.parametrize("trainer_class", [basic.Trainer, ComposableTrainer])
def test_an_overridden_get_optimizer_takes_precedence(problem: Problem, trainer_class: type[basic.Trainer]) -> None:
    class Mine(trainer_class):  # type: ignore[valid-type, misc]  # a class of either kind
        def get_optimizer(self, model: nn.Module) -> Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    trainer = Mine(problem.model(), optimizer_strategy=AdamOptimizerStrategy(lr=0.5), verbose=False)
    trainer.fit(problem.batches, max_length=Epochs(1))
    expected = problem.model()
    train_by_hand(expected, problem.batches, torch.optim.SGD(expected.parameters(), lr=0.1))
    assert_same_weights(trainer.model, expected)


@pytest.mark.parametrize("trainer_class", [basic.Trainer, ComposableTrainer])
def test_an_overridden_get_lr_scheduler_takes_precedence(problem: Problem, trainer_class: type[basic.Trainer]) -> None:
    class Mine(trainer_class):  # type: ignore[valid-type, misc]  # a class of either kind
        def get_lr_scheduler(self, config: Any, optimizer: Optimizer) -> Any:
            return StepLR(optimizer, 1, gamma=0.5)

    trainer = Mine(
        problem.model(),
        optimizer_strategy=SGDOptimizerStrategy(lr=1.0),
        lr_scheduler_strategy=StepLRSchedulerStrategy(1, gamma=0.1, interval="update"),
        verbose=False,
    )
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25


def test_overridden_steps_take_precedence(problem: Problem) -> None:
    class Mine(ComposableTrainer):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            x, y = batch
            return {"loss": functional.cross_entropy(self.model(x), y)}

    before = weights(problem.model())
    trainer = Mine(
        problem.model(), loss_strategy=MSELossStrategy(), optimizer_strategy=SGDOptimizerStrategy(lr=0.1), verbose=False
    )
    trainer.fit(problem.batches, max_length=Epochs(1))
    expected = problem.model()
    train_by_hand(expected, problem.batches, torch.optim.SGD(expected.parameters(), lr=0.1))
    assert_same_weights(trainer.model, expected)
    assert not torch.equal(weights(trainer.model)["0.weight"], before["0.weight"])


def test_the_model_at_a_wall_time_is_the_newest_checkpoint_before_it(problem: Problem, tmp_path: Path) -> None:
    trainer = ComposableTrainer(problem.model(), checkpoint_dir=tmp_path, verbose=False)
    trainer.set_client_id(3)
    trainer.fit(problem.batches, max_length=Epochs(1))
    first, between = weights(trainer.model), datetime.now(timezone.utc)
    trainer.fit(problem.batches, max_length=Epochs(2))
    found = trainer.obtain_model_at_time(3, between)
    assert all(torch.equal(found[name], value) for name, value in first.items())
    latest = trainer.obtain_model_at_time(3, datetime.now(timezone.utc))
    assert all(torch.equal(latest[name], value) for name, value in weights(trainer.model).items())
    with pytest.raises(CheckpointError, match="no checkpoint of client 4"):
        trainer.obtain_model_at_time(4, between)
    with pytest.raises(ConfigError, match="requested_time: expected a time with its zone"):
        trainer.obtain_model_at_time(3, between.replace(tzinfo=None))


def test_the_configured_loss_decides_whether_accuracy_is_reported(problem: Problem) -> None:
    trainer = ComposableTrainer(problem.model(), verbose=False)
    targets = torch.nn.functional.one_hot(problem.y).float()
    found = []
    for loss, labels in (("MSELoss", targets), ("CrossEntropyLoss", problem.y), ("MSELoss", targets)):
        data = (problem.x, labels)
        trainer.context.run.data["valid"] = data
        trainer.train_model({"epochs": 1, "loss_criterion": loss}, data)
        found.append("valid_accuracy" in trainer.history.get_metric_names())
    assert found == [False, True, False]


# ------------------------------------------------------------------ the order of a run


class Recorded:
    """The names of the calls that strategies of one trainer receive, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def strategies(self) -> dict[str, Strategy]:
        events = self.events

        class Update(ModelUpdateStrategy):
            def on_train_start(self, context: TrainingContext) -> None:
                events.append("on_train_start")
                context.state["rate"] = 0.25

        class Loader(DefaultDataLoaderStrategy):
            def create_train_loader(
                self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext
            ) -> Any:
                events.append("loader")
                return super().create_train_loader(trainset, sampler, batch_size, context)

        class Optimize(OptimizerStrategy):
            def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
                events.append("optimizer")
                assert len(context.state["train_loader"]) > 1
                return torch.optim.SGD(model.parameters(), lr=context.state["rate"])

        class Schedule(LRSchedulerStrategy):
            def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> LRScheduler:
                events.append("scheduler")
                return StepLR(optimizer, step_size=1)

        return {
            "model_update_strategy": Update(),
            "data_loader_strategy": Loader(),
            "optimizer_strategy": Optimize(),
            "lr_scheduler_strategy": Schedule(),
        }


ORDER = ["on_train_start", "loader", "optimizer", "scheduler"]


@pytest.mark.parametrize("layer", [None, AMPTrainer, DDPTrainer])
def test_a_run_starts_its_strategies_before_it_builds_the_optimizer(
    problem: Problem, trainset: TensorDataset, layer: Any
) -> None:
    recorded = Recorded()
    trainer: Any = composable(problem.model(), **recorded.strategies())
    (trainer if layer is None else layer(trainer)).fit(trainset, max_length=Epochs(1))
    assert recorded.events == ORDER
    assert trainer.context.schedulers[0].scheduler.base_lrs == [0.25]


def test_every_new_run_calls_strategies_in_the_same_order(problem: Problem, trainset: TensorDataset) -> None:
    recorded = Recorded()
    trainer = composable(problem.model(), **recorded.strategies())
    for _ in range(2):
        trainer.train_model(CONFIG, trainset)
    assert recorded.events == 2 * ORDER


def test_optimizers_exist_when_strategies_start(problem: Problem, trainset: TensorDataset) -> None:
    rates: list[float] = []

    class Reading(ModelUpdateStrategy):
        def on_train_start(self, context: TrainingContext) -> None:
            rates.extend(optimizer.param_groups[0]["lr"] for optimizer in context.optimizers)

    composable(problem.model(), model_update_strategy=Reading()).train_model(CONFIG, trainset)
    assert rates == [0.1]


def test_a_trainer_can_train_after_an_error_before_the_first_batch(problem: Problem, trainset: TensorDataset) -> None:
    class FailsOnce(ModelUpdateStrategy):
        has_failed = False

        def on_train_start(self, context: TrainingContext) -> None:
            if not self.has_failed:
                self.has_failed = True
                raise RuntimeError("once")

    trainer = composable(problem.model(), model_update_strategy=FailsOnce())
    with pytest.raises(RuntimeError, match="once"):
        trainer.train_model(CONFIG, trainset)
    assert list(trainer.context.optimizers) == []
    trainer.train_model(CONFIG, trainset)
    plain = composable(problem.model())
    plain.train_model(CONFIG, trainset)
    assert_same_weights(trainer.model, plain.model)
