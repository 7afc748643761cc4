"""The contracts hold for our own strategies and callbacks, and they bite."""

from __future__ import annotations

import inspect
import math
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dovetail import callbacks as our_callbacks
from dovetail import testing
from dovetail.callbacks import Callback, TrainerCallback
from dovetail.errors import ConfigError
from dovetail.trainers import recipe
from dovetail.trainers import strategies as ours
from dovetail.trainers.context import TrainingContext
from dovetail.units import Updates

Contract = Any


# ------------------------------------------------------------------ problems that are not the default one


def regression_data() -> tuple[Tensor, Tensor]:
    x = torch.randn(18, 4, generator=torch.Generator().manual_seed(3))
    return x, x[:, :3].tanh()


def binary_data() -> tuple[Tensor, Tensor]:
    x, y = regression_data()
    return x, (y > 0).long()


def with_log_softmax() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(dim=1))


def with_dropout() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 3))


# ------------------------------------------------------------------ our own

OURS: list[type[Contract]] = []


def add(contract: type[Contract], make: Callable[[], Any], label: str = "", **settings: Any) -> None:
    """Add a class of tests for what `make` makes; `settings` are a contract's methods and attributes."""
    members = {name: (lambda self, it=it: it()) if inspect.isfunction(it) else it for name, it in settings.items()}
    name = f"Test{type(make()).__name__}{label}"
    OURS.append(type(name, (contract,), {"make": lambda self: make(), **members, "__module__": __name__}))


loss = partial(add, testing.LossStrategyContract)
loss(ours.CrossEntropyLossStrategy)
loss(lambda: ours.CrossEntropyLossStrategy(label_smoothing=0.1), "Smoothed")
loss(ours.MSELossStrategy, make_data=regression_data)
loss(ours.BCEWithLogitsLossStrategy, make_data=binary_data)
loss(ours.NLLLossStrategy, make_model=with_log_softmax)
loss(ours.L2RegularizationStrategy)
loss(ours.DefaultLossCriterionStrategy)
loss(lambda: ours.DefaultLossCriterionStrategy(functional.mse_loss), "OfFunction", make_data=regression_data)
loss(lambda: ours.CompositeLossStrategy([ours.CrossEntropyLossStrategy(), (ours.L2RegularizationStrategy(0.1), 0.5)]))
loss(lambda: recipe.as_strategy("loss", "MultiMarginLoss"), "OfName")

optimizer = partial(add, testing.OptimizerStrategyContract)
optimizer(ours.DefaultOptimizerStrategy)
optimizer(lambda: ours.SGDOptimizerStrategy(lr=0.1, momentum=0.9, nesterov=True))
optimizer(lambda: ours.AdamOptimizerStrategy(lr=0.01, amsgrad=True))
optimizer(lambda: ours.AdamWOptimizerStrategy(lr=0.01))
optimizer(lambda: ours.RMSpropOptimizerStrategy(lr=0.01, centered=True))
optimizer(
    lambda: ours.ParameterGroupOptimizerStrategy(
        torch.optim.Adam,
        lambda model: [
            {"params": model[0].parameters()},  # type: ignore[index]
            {"params": model[2].parameters(), "lr": 0.001},  # type: ignore[index]
        ],
        default_lr=0.01,
    )
)
optimizer(lambda: ours.GradientClippingOptimizerStrategy(ours.AdamOptimizerStrategy(lr=0.01), max_norm=0.1))
optimizer(lambda: recipe.as_strategy("optimizer", partial(torch.optim.AdamW, lr=0.01)), "OfPartial")


def backward_by_hand(model: nn.Module, loss: Tensor, context: TrainingContext) -> None:
    context.backward(loss)


def plain_step(
    model: nn.Module, optimizer: Optimizer, examples: Any, labels: Any, criterion: Any, context: TrainingContext
) -> Tensor:
    result: Tensor = criterion(model(examples), labels)
    context.backward(result)
    context.step(optimizer)
    return result


step = partial(add, testing.TrainingStepStrategyContract)
step(ours.DefaultTrainingStepStrategy)
step(lambda: ours.GradientAccumulationStepStrategy(accumulation_steps=2))
step(lambda: ours.MixedPrecisionStepStrategy(precision="bf16"), "BF16", changes_gradients=True)
step(lambda: ours.MixedPrecisionStepStrategy(precision="fp16"), "FP16", changes_gradients=True)
step(lambda: ours.GradientClippingStepStrategy(max_norm=0.1), changes_gradients=True)
step(lambda: ours.CustomBackwardStepStrategy(backward_by_hand))
step(lambda: ours.MultipleForwardPassStepStrategy(3))
step(lambda: ours.MultipleForwardPassStepStrategy(3), "OfDropout", make_model=with_dropout, changes_gradients=True)
step(lambda: ours.ValidateBeforeStepStrategy(raise_on_error=True))
step(lambda: recipe.as_strategy("training_step", plain_step))
step(
    lambda: ours.compose_steps(
        ours.GradientAccumulationStepStrategy(2),
        ours.ValidateBeforeStepStrategy(),
        ours.MultipleForwardPassStepStrategy(2),
        ours.CustomBackwardStepStrategy(backward_by_hand),
    ),
    "Composed",
)


class TimmLike:
    """What timm's schedulers look like."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.updates = optimizer, 0

    def step_update(self, num_updates: int) -> None:
        self.updates = num_updates
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + num_updates)

    def step(self, epoch: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 1 + epoch

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates = state["updates"]


schedule = partial(add, testing.LRSchedulerStrategyContract)
schedule(ours.NoSchedulerStrategy)
schedule(ours.DefaultLRSchedulerStrategy)
schedule(lambda: ours.StepLRSchedulerStrategy(step_size=2))
schedule(lambda: ours.MultiStepLRSchedulerStrategy([2, 5], interval="update", frequency=2))
schedule(lambda: ours.ExponentialLRSchedulerStrategy(0.9, interval="batch"))
schedule(lambda: ours.CosineAnnealingLRSchedulerStrategy(T_max=12, interval="update"))
schedule(lambda: ours.CosineAnnealingWarmRestartsSchedulerStrategy(T_0=3, T_mult=2))
schedule(lambda: ours.ReduceLROnPlateauSchedulerStrategy(patience=2, factor=0.5))
schedule(lambda: ours.LinearLRSchedulerStrategy(total_iters=4, interval="update"))
schedule(lambda: ours.PolynomialLRSchedulerStrategy(total_iters=8, interval="update"))
schedule(
    lambda: ours.WarmupSchedulerStrategy(
        3, 0.01, ours.StepLRSchedulerStrategy(step_size=2, interval="update"), interval="update"
    )
)
schedule(lambda: ours.TimmLRSchedulerStrategy(TimmLike))
schedule(lambda: recipe.as_strategy("lr_scheduler", partial(torch.optim.lr_scheduler.StepLR, step_size=3)), "OfPartial")

update = partial(add, testing.ModelUpdateStrategyContract)
update(ours.NoOpUpdateStrategy)
update(ours.StateTrackingUpdateStrategy)
update(lambda: ours.CompositeUpdateStrategy([ours.NoOpUpdateStrategy(), ours.StateTrackingUpdateStrategy()]))
update(lambda: recipe.as_strategy("model_update", lambda context: context.state.update(seen=context.progress.updates)))


def doubled(context: TrainingContext) -> int:
    return 2 * int(context.state["batch_size"])


loader = partial(add, testing.DataLoaderStrategyContract)
loader(ours.DefaultDataLoaderStrategy)
loader(lambda: ours.DefaultDataLoaderStrategy(shuffle=True, drop_last=True), "Dropping", changes_samples=True)
loader(lambda: ours.CustomCollateFnDataLoaderStrategy(torch.utils.data.default_collate))
loader(ours.PrefetchDataLoaderStrategy)
loader(ours.ShuffleDataLoaderStrategy)
loader(lambda: ours.DynamicBatchSizeDataLoaderStrategy(3, adjust_fn=lambda context: 2 + context.current_epoch))
loader(lambda: ours.DynamicBatchSizeDataLoaderStrategy(2, adjust_fn=doubled), "Doubling")

add(testing.TestingStrategyContract, ours.DefaultTestingStrategy)


class Noted(TrainerCallback):
    def on_train_step_end(self, trainer: Any, config: Any, batch: Any = None, loss: Any = None, **kwargs: Any) -> None:
        trainer.context.state["noted"] = batch


watch = partial(add, testing.CallbackContract)
watch(lambda: our_callbacks.EMA(decay=0.9))
watch(lambda: our_callbacks.EarlyStopping(patience=3))
watch(lambda: our_callbacks.GradientClipping(max_norm=0.1), changes_training=True)
watch(lambda: our_callbacks.ImprovementWindow(3, 0.0, monitor="valid_loss"))
watch(lambda: our_callbacks.LRMonitor(Updates(2)))
watch(lambda: our_callbacks.LambdaCallback(on_update=lambda context: None))
watch(lambda: our_callbacks.MaxTime(3600))
watch(our_callbacks.NonFiniteLoss)
watch(lambda: our_callbacks.ProgressDisplay(console=Console(file=StringIO())))
watch(lambda: our_callbacks.ReduceOnPlateau(patience=0, threshold=10.0), changes_training=True)
watch(our_callbacks.SWA, changes_training=True)
watch(lambda: our_callbacks.StopWhen("valid_loss", -1.0))
watch(our_callbacks.Timer)
watch(Noted)


class TestCSVLogger(testing.CallbackContract):
    """A log continues in its file."""

    logger: ClassVar[type[Callback]] = our_callbacks.CSVLogger

    @pytest.fixture(autouse=True)
    def in_a_folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "log"

    def make(self) -> Callback:
        return self.logger(self.path)  # type: ignore[call-arg]


class TestJSONLLogger(TestCSVLogger):
    logger = our_callbacks.JSONLLogger


class TestProfiler(TestCSVLogger):
    logger = our_callbacks.Profiler


globals().update({contract.__name__: contract for contract in OURS})


def test_every_concrete_strategy_has_a_contract_test() -> None:
    found = {name: getattr(ours, name) for name in ours.__all__}
    abstract = {"Anchored", "ModelUpdateStrategy", "NestingStepStrategy", "SplitStepStrategy", "Strategy"}
    concrete = {
        name
        for name, it in found.items()
        if isinstance(it, type) and issubclass(it, ours.Strategy) and not inspect.isabstract(it)
    }
    assert concrete - abstract == {type(it().make()).__name__ for it in OURS} & concrete


def test_every_callback_has_a_contract_test() -> None:
    found = {name: getattr(our_callbacks, name) for name in our_callbacks.__all__}
    abstract = {"Callback", "LambdaCallback", "Monitor", "PlatoAdapter"}
    concrete = {name for name, it in found.items() if isinstance(it, type) and issubclass(it, Callback)}
    by_hand = {"CSVLogger", "JSONLLogger", "Profiler"}
    assert concrete - abstract <= {type(it().make()).__name__ for it in OURS} | by_hand


# ------------------------------------------------------------------ what pytest sees


def test_contract_classes_are_not_collected_as_tests() -> None:
    assert [name for name in testing.__all__ if getattr(testing, name).__test__] == []


def test_a_contract_subclass_with_a_factory_is_collected() -> None:
    class Mine(testing.TestingStrategyContract):
        def make(self) -> ours.TestingStrategy:
            return ours.DefaultTestingStrategy()

    assert Mine.__test__


def test_a_user_base_class_is_not_collected_without_a_factory() -> None:
    class Base(testing.LossStrategyContract):
        def make_data(self) -> Any:
            return regression_data()

    assert not Base.__test__


def test_the_testing_module_does_not_import_pytest() -> None:
    code = "import sys, dovetail.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------ the contracts bite


class VectorLoss(ours.LossCriterionStrategy):
    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        return functional.cross_entropy(outputs, labels, reduction="none")


class DetachedPart(ours.LossCriterionStrategy):
    """Forgets half of its gradient."""

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        penalty: Tensor = outputs.square().mean().detach()
        return functional.cross_entropy(outputs, labels) + penalty


class InPlaceLoss(ours.LossCriterionStrategy):
    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        labels.zero_()
        return functional.cross_entropy(outputs, labels)


class InfiniteLoss(ours.LossCriterionStrategy):
    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        loss: Tensor = outputs.sum() * math.inf
        return loss


class SharedLoss(ours.CrossEntropyLossStrategy):
    """Counts all batches of all trainers, by mistake."""

    calls: ClassVar[list[int]] = []

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        self.calls.append(1)
        return super().compute_loss(outputs, labels, context) / len(self.calls)


class ForgetfulLoss(ours.CrossEntropyLossStrategy):
    """Has a state that no checkpoint keeps."""

    calls = 0

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        self.calls += outputs.requires_grad
        return super().compute_loss(outputs, labels, context) / (1 + self.calls)


class LopsidedState(ForgetfulLoss):
    """Writes a state and does not read it."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}


class RandomLoss(ours.CrossEntropyLossStrategy):
    """Draws from a generator of the machine."""

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        return super().compute_loss(outputs, labels, context) * random.SystemRandom().random()


class WornOut(ours.CrossEntropyLossStrategy):
    """Is another one after its teardown."""

    def teardown(self, context: TrainingContext) -> None:
        self.label_smoothing = 0.5


class RewordingStep(ours.TrainingStepStrategy):
    def training_step(
        self, model: Any, optimizer: Any, examples: Any, labels: Any, criterion: Any, context: Any
    ) -> Any:
        try:
            return criterion(model(examples), labels)
        except Exception as error:
            raise RuntimeError("the step failed") from error


class HalvedStep(ours.TrainingStepStrategy):
    def training_step(
        self, model: Any, optimizer: Any, examples: Any, labels: Any, criterion: Any, context: Any
    ) -> Any:
        loss = criterion(model(examples), labels)
        context.backward(loss / 2)
        context.step(optimizer)
        return loss


class StepPastTheContext(ours.TrainingStepStrategy):
    """Steps twice without the context, which counts one update."""

    def training_step(
        self, model: Any, optimizer: Any, examples: Any, labels: Any, criterion: Any, context: Any
    ) -> Any:
        for _ in range(2):
            optimizer.zero_grad()
            loss = criterion(model(examples), labels)
            loss.backward()
            optimizer.step()
        return loss


class StepsInsideTheWindow(ours.NestingStepStrategy):
    """Steps with every batch, whether or not the accumulation window closes."""

    def differentiate(self, model: Any, optimizer: Any, loss: Any, context: Any, options: Any) -> None:
        context.backward(loss)
        optimizer.step()


class WeightsOnly(ours.OptimizerStrategy):
    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        return torch.optim.SGD([it for it in model.parameters() if it.ndim > 1], lr=0.1)


class ForeignParameters(ours.OptimizerStrategy):
    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)


class Eager(ours.SGDOptimizerStrategy):
    """Steps once more in the hook of a step."""

    def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
        optimizer.step()


class Thawing(ours.SGDOptimizerStrategy):
    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        model.requires_grad_(True)
        return super().create_optimizer(model, context)


class ForgetfulLR(LRScheduler):
    """Keeps its place where no state is taken of it."""

    places: ClassVar[dict[int, int]] = {}

    def get_lr(self) -> list[float | Tensor]:
        place = self.places[id(self)] = self.places.get(id(self), 0) + 1
        return [base / place for base in self.base_lrs]


class ForgetfulSchedule(ours.LRSchedulerStrategy):
    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> LRScheduler:
        ForgetfulLR.places.clear()
        return ForgetfulLR(optimizer)


class NegativeSchedule(ours.LRSchedulerStrategy):
    def create_scheduler(self, optimizer: Optimizer, context: TrainingContext) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 - step)


class Hourly(ours.StepLRSchedulerStrategy):
    def __post_init__(self) -> None:
        self.interval = "hour"  # type: ignore[assignment]  # the mistake under test


class SendsTheModelItself(ours.ModelUpdateStrategy):
    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        assert context.model is not None
        return {"weights": context.model.state_dict()}


class HidesTheWeights(ours.ModelUpdateStrategy):
    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        return {"model_update": 1}


class ForgetsTheLast(ours.DefaultDataLoaderStrategy):
    def create_train_loader(self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext) -> Any:
        return list(super().create_train_loader(trainset, sampler, batch_size, context))[:-1]


class ForgetsTheSampler(ours.DefaultDataLoaderStrategy):
    def create_train_loader(self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext) -> Any:
        return super().create_train_loader(trainset, None, batch_size, context)


class OwnOrder(ours.DefaultDataLoaderStrategy):
    """Shuffles by the clock of the machine."""

    def create_train_loader(self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext) -> Any:
        batches = list(super().create_train_loader(trainset, sampler, 1, context))
        random.SystemRandom().shuffle(batches)
        return batches


class Boasting(list[Any]):
    def __len__(self) -> int:
        return super().__len__() + 1


class WrongLength(ours.DefaultDataLoaderStrategy):
    def create_train_loader(self, trainset: Any, sampler: Any, batch_size: int, context: TrainingContext) -> Any:
        return Boasting(super().create_train_loader(trainset, sampler, batch_size, context))


class TrainsInTheTest(ours.DefaultTestingStrategy):
    def test_model(self, model: nn.Module, *args: Any) -> float:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return super().test_model(model, *args)


class Undecided(ours.TestingStrategy):
    def test_model(self, *args: Any) -> float:
        return math.nan


class TestsEverything(ours.DefaultTestingStrategy):
    def test_model(self, model: nn.Module, config: Any, testset: Any, sampler: Any, context: TrainingContext) -> float:
        return super().test_model(model, config, testset, None, context)


class Meddling(Callback):
    def on_update(self, context: TrainingContext) -> None:
        assert context.model is not None
        with torch.no_grad():
            next(context.model.parameters()).mul_(0.9)


class EndsAtOnce(Callback):
    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        context.stop("enough")


class OnceOnly(Callback):
    ran = False

    def on_train_end(self, context: TrainingContext) -> None:
        self.ran = True

    def on_epoch_start(self, context: TrainingContext) -> None:
        if self.ran:
            context.stop("only once")


BROKEN = [
    (testing.LossStrategyContract, VectorLoss, "test_loss_is_one_finite_number"),
    (testing.LossStrategyContract, InfiniteLoss, "test_loss_is_one_finite_number"),
    (testing.LossStrategyContract, DetachedPart, "test_gradient_agrees_with_finite_differences"),
    (testing.LossStrategyContract, InPlaceLoss, "test_loss_leaves_the_batch_alone"),
    (testing.LossStrategyContract, SharedLoss, "test_two_trainers_share_nothing"),
    (testing.LossStrategyContract, ForgetfulLoss, "test_training_resumes_bit_for_bit"),
    (testing.LossStrategyContract, LopsidedState, "test_state_survives_a_round_trip"),
    (testing.LossStrategyContract, RandomLoss, "test_training_is_reproducible"),
    (testing.LossStrategyContract, WornOut, "test_setup_and_teardown_can_be_repeated"),
    (testing.LossStrategyContract, ours.SGDOptimizerStrategy, "test_is_of_its_kind"),
    (testing.OptimizerStrategyContract, WeightsOnly, "test_optimizer_has_every_trainable_parameter_once"),
    (testing.OptimizerStrategyContract, ForeignParameters, "test_optimizer_has_every_trainable_parameter_once"),
    (testing.OptimizerStrategyContract, Eager, "test_on_optimizer_step_follows_every_real_step"),
    (testing.OptimizerStrategyContract, Thawing, "test_frozen_parameters_stay"),
    (testing.TrainingStepStrategyContract, RewordingStep, "test_errors_keep_their_type"),
    (testing.TrainingStepStrategyContract, HalvedStep, "test_gradients_are_those_of_a_plain_backward"),
    (testing.TrainingStepStrategyContract, StepPastTheContext, "test_updates_are_real_steps"),
    (testing.TrainingStepStrategyContract, StepsInsideTheWindow, "test_accumulation_is_inherited"),
    (testing.LRSchedulerStrategyContract, ForgetfulSchedule, "test_state_continues_exactly"),
    (testing.LRSchedulerStrategyContract, NegativeSchedule, "test_rates_are_finite_and_not_negative"),
    (testing.LRSchedulerStrategyContract, Hourly, "test_interval_and_frequency_are_known"),
    (testing.ModelUpdateStrategyContract, SendsTheModelItself, "test_payload_is_a_copy"),
    (testing.ModelUpdateStrategyContract, HidesTheWeights, "test_payload_leaves_the_weights_their_name"),
    (testing.DataLoaderStrategyContract, ForgetsTheLast, "test_every_sample_comes_once"),
    (testing.DataLoaderStrategyContract, ForgetsTheSampler, "test_a_sampler_chooses_the_samples"),
    (testing.DataLoaderStrategyContract, OwnOrder, "test_order_follows_the_seed"),
    (testing.DataLoaderStrategyContract, WrongLength, "test_length_is_true"),
    (testing.TestingStrategyContract, TrainsInTheTest, "test_testing_leaves_the_model_alone"),
    (testing.TestingStrategyContract, Undecided, "test_result_is_one_finite_number"),
    (testing.TestingStrategyContract, TestsEverything, "test_a_sampler_chooses_the_samples"),
    (testing.CallbackContract, Meddling, "test_watching_changes_nothing"),
    (testing.CallbackContract, EndsAtOnce, "test_trains_two_epochs"),
    (testing.CallbackContract, OnceOnly, "test_serves_a_second_run"),
]


def test_a_step_outside_the_context_cannot_inherit_accumulation() -> None:
    tested = type("Broken", (testing.TrainingStepStrategyContract,), {"make": lambda self: StepPastTheContext()})
    with pytest.raises(ConfigError, match=r"accumulation_steps would have no effect: call context\.backward"):
        tested().test_accumulation_is_inherited()


@pytest.mark.parametrize(("contract", "broken", "test"), BROKEN, ids=[f"{it[1].__name__}-{it[2]}" for it in BROKEN])
def test_a_broken_object_fails_its_contract(contract: type[Contract], broken: Callable[[], Any], test: str) -> None:
    tested = type("Broken", (contract,), {"make": lambda self: broken()})
    with pytest.raises(AssertionError):
        getattr(tested(), test)()


def test_every_contract_test_fails_for_some_broken_object() -> None:
    # The contracts of searchers, backends and algorithms are broken in the test_contract.py of their folders.
    elsewhere = ("AlgorithmContract", "SearcherContract", "BackendContract")
    contracts = [getattr(testing, name) for name in testing.__all__ if name not in elsewhere]
    tests = {name for contract in contracts for name in dir(contract) if name.startswith("test_")}
    assert tests == {test for _, _, test in BROKEN}
