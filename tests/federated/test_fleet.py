"""Many models at once train as each of them would."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.callbacks import Callback
from dovetail.errors import ConfigError
from dovetail.federated.fleet import FleetTrainer, Member, fleet_obstacle, stack_models
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import Phase
from dovetail.trainers.decorators import AMPTrainer
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    CrossEntropyLossStrategy,
    DefaultOptimizerStrategy,
    GradientAccumulationStepStrategy,
    LinearLRSchedulerStrategy,
    ModelUpdateStrategy,
    ReduceLROnPlateauSchedulerStrategy,
    SGDOptimizerStrategy,
    ShuffleDataLoaderStrategy,
    StateTrackingUpdateStrategy,
    StepLRSchedulerStrategy,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.second(self.first(x).tanh()))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic": (lambda: nn.Linear(6, 3), (6,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (6,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
        ),
        (1, 8, 8),
    ),
    "shared": (Tied, (6,)),
}
OPTIMIZERS = {
    "sgd": SGDOptimizerStrategy(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": AdamOptimizerStrategy(lr=0.01),
}
SIZES = (25, 7, 40, 16)


def trainer_of(model: nn.Module, **options: Any) -> ComposableTrainer:
    options = {"data_loader_strategy": ShuffleDataLoaderStrategy(), **options}
    return ComposableTrainer(model, num_epochs=3, batch_size=8, verbose=False, **options)


def data_of(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for size in SIZES
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_fleet_equals_each_of_its_members_alone(
    kind: str, optimizer: str, dtype: torch.dtype, tolerance: float
) -> None:
    make, shape = MODELS[kind]
    torch.manual_seed(0)
    model, data = make().to(dtype), data_of(shape, dtype)
    options = {"optimizer_strategy": OPTIMIZERS[optimizer], "gradient_clip": 0.5}
    members = [Member(model.state_dict(), own, seed) for seed, own in enumerate(data)]
    fleet = FleetTrainer(trainer_of(copy.deepcopy(model), **options), members)
    fleet.train_together()
    assert fleet.num_updates == [12, 3, 15, 6]
    for position, own in enumerate(data):
        alone = trainer_of(copy.deepcopy(model), **options)
        alone.context.state["order_seed"] = position
        history = alone.fit(own)
        assert alone.context.progress.updates == fleet.num_updates[position]
        assert fleet.losses[position] == pytest.approx(history.get_latest_metric("train_loss"), abs=1e-6)
        for name, value in fleet.state_of(position).items():
            torch.testing.assert_close(value, alone.model.state_dict()[name], rtol=0, atol=tolerance)


def test_members_may_start_with_different_weights_and_an_update_schedule() -> None:
    models = [nn.Linear(6, 3) for _ in SIZES]
    data = data_of((6,), torch.float32)
    options = {"lr_scheduler_strategy": LinearLRSchedulerStrategy(total_iters=10, interval="update")}
    members = [Member(model.state_dict(), own, 0) for model, own in zip(models, data, strict=True)]
    assert fleet_obstacle(trainer_of(models[0], **options)) is None
    fleet = FleetTrainer(trainer_of(copy.deepcopy(models[0]), **options), members)
    fleet.train_together()
    for position, (model, own) in enumerate(zip(models, data, strict=True)):
        alone = trainer_of(copy.deepcopy(model), **options)
        alone.context.state["order_seed"] = 0
        alone.fit(own)
        torch.testing.assert_close(fleet.state_of(position), alone.model.state_dict(), rtol=0, atol=1e-6)


def test_a_member_that_is_not_finite_does_not_affect_others() -> None:
    model = nn.Linear(6, 3)
    data = data_of((6,), torch.float32)
    bad = (torch.full_like(data[1][0], torch.inf), data[1][1])

    def trained(second: Any) -> FleetTrainer:
        members = [Member(model.state_dict(), own, 0) for own in (data[0], second, data[2])]
        fleet = FleetTrainer(trainer_of(copy.deepcopy(model), nonfinite="ignore"), members)
        fleet.train_together()
        return fleet

    healthy, sick = trained(data[1]), trained(bad)
    assert not sick.state_of(1)["weight"].isfinite().all()
    for position in (0, 2):
        assert torch.equal(sick.state_of(position)["weight"], healthy.state_of(position)["weight"])


class TwoPhases(ModelUpdateStrategy):
    vectorizes = True

    def phases(self, epochs: int, context: Any) -> Sequence[Phase]:
        return Phase(epochs), Phase(epochs, "again")


BY_UPDATES = LinearLRSchedulerStrategy(total_iters=10, interval="update")


@pytest.mark.parametrize(
    ("options", "sizes", "reason"),
    [
        ({"optimizer_strategy": SGDOptimizerStrategy(lr=0.1)}, (25, 7), None),
        ({"optimizer_strategy": OPTIMIZERS["sgd"]}, (25, 25), None),
        ({"optimizer_strategy": OPTIMIZERS["sgd"]}, (25, 7), "the optimizer's state continues in a second phase"),
        ({"optimizer_strategy": OPTIMIZERS["adam"]}, (25, 7), "the optimizer's state continues in a second phase"),
        ({"lr_scheduler_strategy": BY_UPDATES}, (25, 25), None),
        ({"lr_scheduler_strategy": BY_UPDATES}, (25, 7), "a schedule continues in a second phase"),
    ],
)
def test_phases_continue_only_equal_counters_of_members(
    options: dict[str, Any], sizes: tuple[int, ...], reason: str | None
) -> None:
    model = nn.Linear(6, 3)
    data = [(torch.randn(size, 6), torch.randint(0, 3, (size,))) for size in sizes]
    options = {"model_update_strategy": TwoPhases(), **options}
    members = [Member(model.state_dict(), own, 0) for own in data]
    fleet = FleetTrainer(trainer_of(copy.deepcopy(model), **options), members)
    if reason is not None:
        with pytest.raises(ConfigError, match=reason):
            fleet.train_together()
        return
    fleet.train_together()
    for position, own in enumerate(data):
        alone = trainer_of(copy.deepcopy(model), **options)
        alone.context.state["order_seed"] = 0
        alone.fit(own)
        torch.testing.assert_close(fleet.state_of(position), alone.model.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", [None, nn.functional.cross_entropy, CrossEntropyLossStrategy(ignore_index=2)])
def test_labels_ignored_by_the_loss_are_an_error(loss: Any) -> None:
    model = nn.Linear(6, 3)
    labels = torch.ones(16, dtype=torch.long)
    labels[9] = 2 if isinstance(loss, CrossEntropyLossStrategy) else -100
    options = {} if loss is None else {"loss_strategy": loss}
    members = [Member(model.state_dict(), (torch.randn(16, 6), labels), 0)]
    with pytest.raises(ConfigError, match=f"samples with the label {int(labels[9])} do not count"):
        FleetTrainer(trainer_of(model, **options), members).train_together()


def test_a_stacked_model_keeps_the_parameter_names() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    many = stack_models(model, [model.state_dict()] * 4)
    assert {name: value.shape for name, value in many.state_dict().items()} == {
        name: (4, *value.shape) for name, value in model.state_dict().items()
    }
    x = torch.randn(4, 5, 2)
    torch.testing.assert_close(many(x), model(x))


class Watching(Callback):
    def on_step_end(self, context: Any, output: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), {}, "Dropout draws random numbers"),
        (nn.BatchNorm1d(2), {}, "BatchNorm1d computes statistics over the whole batch, but batches are padded"),
        (nn.LSTM(2, 2), {}, "LSTM cannot be mapped over clients by torch.func.vmap"),
        (nn.Linear(2, 2), {"accumulation_steps": 2}, "several batches share one update"),
        (
            nn.Linear(2, 2),
            {"training_step_strategy": GradientAccumulationStepStrategy(2)},
            "GradientAccumulationStepStrategy has its own step",
        ),
        (
            nn.Linear(2, 2),
            {"model_update_strategy": StateTrackingUpdateStrategy()},
            "StateTrackingUpdateStrategy handles the model of one client",
        ),
        (nn.Linear(2, 2), {"callbacks": [Watching()]}, "Watching has a hook for every step"),
        (
            nn.Linear(2, 2),
            {"loss_strategy": CrossEntropyLossStrategy(weight=torch.ones(2))},
            "the loss is not an unweighted mean over samples",
        ),
        (nn.Linear(2, 2), {"loss_strategy": nn.KLDivLoss()}, "the loss KLDivLoss may not be a mean over samples"),
        (
            nn.Linear(2, 2),
            {"optimizer_strategy": DefaultOptimizerStrategy(lambda it: torch.optim.LBFGS(it.parameters()))},
            "LBFGS may use whole tensors instead of single elements",
        ),
        (
            nn.Linear(2, 2),
            {"lr_scheduler_strategy": StepLRSchedulerStrategy()},
            "a schedule moves at every epoch, which is at a different step for each client",
        ),
        (
            nn.Linear(2, 2),
            {"lr_scheduler_strategy": ReduceLROnPlateauSchedulerStrategy(interval="update")},
            "ReduceLROnPlateau follows a metric, which differs between clients",
        ),
    ],
)
def test_members_that_cannot_be_vectorized_are_named(model: nn.Module, options: dict[str, Any], reason: str) -> None:
    assert fleet_obstacle(ComposableTrainer(model, verbose=False, **options)) == reason


def test_a_layer_around_the_trainer_is_named_as_a_reason() -> None:
    assert fleet_obstacle(AMPTrainer(trainer_of(nn.Linear(2, 2)))) == "AMPTrainer is a layer around the trainer"
