"""FedMos: the optimizer, the second gradient, and the pull."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, federation, mlp

from dovetail.algorithms import CompositeAlgorithm, FedAvg, FedProx
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedmos import (
    FedMos,
    FedMosOptimizer,
    FedMosOptimizerStrategy,
    FedMosOptimizerStrategyFromConfig,
    FedMosStepStrategy,
    FedMosUpdateStrategy,
)
from dovetail.federated.algorithms.fedsam import FedSAM
from dovetail.testing import (
    AlgorithmContract,
    ModelUpdateStrategyContract,
    OptimizerStrategyContract,
    TrainingStepStrategyContract,
)
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import reset
from dovetail.trainers.strategies import (
    GradientAccumulationStepStrategy,
    GradientClippingOptimizerStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    ParameterGroupOptimizerStrategy,
    SGDOptimizerStrategy,
    TrainingStepStrategy,
)


class TestFedMos(AlgorithmContract):
    def make(self) -> FedMos:
        return FedMos(a=0.3, mu=0.05)


@pytest.mark.torture
class TestReuse(AlgorithmContract):
    def make(self) -> FedMos:
        return FedMos(a=0.3, mu=0.05, reuse_gradient=True)


class TestOptimizer(OptimizerStrategyContract):
    def make(self) -> FedMosOptimizerStrategy:
        return FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05)

    def make_options(self) -> dict[str, Any]:
        return {"training_step_strategy": FedMosStepStrategy()}


class TestOptimizerFromConfig(OptimizerStrategyContract):
    def make(self) -> FedMosOptimizerStrategyFromConfig:
        return FedMosOptimizerStrategyFromConfig(lr=0.1)


class TestUpdate(ModelUpdateStrategyContract):
    def make(self) -> FedMosUpdateStrategy:
        return FedMosUpdateStrategy()

    def make_options(self) -> dict[str, Any]:
        return {
            "optimizer_strategy": FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05),
            "training_step_strategy": FedMosStepStrategy(),
        }


class TestStep(TrainingStepStrategyContract):
    changes_gradients = True

    def make(self) -> FedMosStepStrategy:
        return FedMosStepStrategy()

    def make_options(self) -> dict[str, Any]:
        return {"optimizer_strategy": FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05)}


class TestPlainStep(TrainingStepStrategyContract):
    """With another optimizer."""

    def make(self) -> FedMosStepStrategy:
        return FedMosStepStrategy()


def _trained(
    optimizer: Any, step: TrainingStepStrategy | None = None, batch_size: int = 8, epochs: int = 3, **options: Any
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trainer = ComposableTrainer(
        mlp(),
        optimizer_strategy=optimizer,
        training_step_strategy=step,
        num_epochs=epochs,
        batch_size=batch_size,
        verbose=False,
        **options,
    )
    x, y = Blobs().train_data(1)
    trainer.fit((x[:24], y[:24]))
    state: dict[str, Tensor] = trainer.model.state_dict()
    return state


def _gradient(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model = mlp()
    model.load_state_dict(weights)
    nn.functional.cross_entropy(model(x), y).backward()
    return {name: value.grad for name, value in model.named_parameters()}


def _by_hand(
    second: Callable[[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]], a: float, mu: float
) -> dict[str, Tensor]:
    """Nine steps of 0.1 by the paper's equations; `second` is given g_t, x_{t-1} and the batch."""
    torch.manual_seed(0)
    x = {name: value.detach().clone() for name, value in mlp().named_parameters()}
    inputs, labels = Blobs().train_data(1)
    start, previous, d = x, x, {}
    for number in range(9):
        batch = slice(8 * (number % 3), 8 * (number % 3) + 8)
        g = _gradient(x, inputs[batch], labels[batch])
        if not d:
            d = g
        else:
            other = second(g, previous, inputs[batch], labels[batch])
            d = {name: g[name] + (1 - a) * (d[name] - other[name]) for name in g}
        previous = x
        x = {name: value - 0.1 * d[name] for name, value in x.items()}
        x = {name: value - mu * (value - start[name]) for name, value in x.items()}
    return x


def test_fedmos_steps_follow_the_paper() -> None:
    ours = _trained(FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05), FedMosStepStrategy())
    expected = _by_hand(lambda g, previous, x, y: _gradient(previous, x, y), a=0.3, mu=0.05)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("step", [None, FedMosStepStrategy(reuse_gradient=True)])
def test_a_reused_gradient_gives_a_moving_average(step: TrainingStepStrategy | None) -> None:
    ours = _trained(FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05), step)
    expected = _by_hand(lambda g, previous, x, y: g, a=0.3, mu=0.05)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    assert (ours["head.bias"] - _trained(SGDOptimizerStrategy(lr=0.1))["head.bias"]).abs().max() > 1e-3


@pytest.mark.parametrize("reuse_gradient", [False, True])
def test_fedmos_with_a_1_and_mu_0_is_sgd(reuse_gradient: bool) -> None:
    ours = _trained(FedMosOptimizerStrategy(lr=0.1, a=1.0, mu=0.0), FedMosStepStrategy(reuse_gradient))
    torch.testing.assert_close(ours, _trained(SGDOptimizerStrategy(lr=0.1)), rtol=0, atol=1e-7)


def test_fedmos_with_a_1_and_mu_0_equals_fedavg() -> None:
    def run(algorithm: Any) -> dict[str, Tensor]:
        optimizer = SGDOptimizerStrategy(lr=0.2)
        trainer = ComposableTrainer(optimizer_strategy=optimizer, num_epochs=2, batch_size=8, verbose=False)
        return dict(federation(algorithm, trainer=trainer).weights)

    torch.testing.assert_close(run(FedMos(a=1.0, mu=0.0)), run(FedAvg()), rtol=0, atol=1e-7)


def test_fedmos_with_a_0_on_full_batches_is_gradient_descent() -> None:
    ours = _trained(FedMosOptimizerStrategy(lr=0.1, a=0.0, mu=0.0), FedMosStepStrategy(), batch_size=24, epochs=10)
    plain = _trained(SGDOptimizerStrategy(lr=0.1), batch_size=24, epochs=10)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_every_layer_is_pulled_to_its_initial_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    starts = [value.detach().clone() for value in model.parameters()]
    optimizer = FedMosOptimizer(model.parameters(), lr=1.0, mu=0.25)
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    optimizer.step()
    for value, start in zip(model.parameters(), starts, strict=True):
        torch.testing.assert_close(value.detach(), start - 0.75)


def test_with_mu_1_no_weight_moves() -> None:
    torch.manual_seed(0)
    ours = _trained(FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=1.0), FedMosStepStrategy())
    torch.manual_seed(0)
    torch.testing.assert_close(ours, mlp().state_dict(), rtol=0, atol=0)


def test_the_momentum_is_reset_at_every_run() -> None:
    torch.manual_seed(0)
    trainer = ComposableTrainer(
        mlp(),
        optimizer_strategy=FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05),
        training_step_strategy=FedMosStepStrategy(),
        model_update_strategy=FedMosUpdateStrategy(),
        num_epochs=1,
        batch_size=8,
        verbose=False,
    )
    for _ in range(2):
        begin = trainer.model.head.weight.detach().clone()
        optimizer = trainer.optimizer
        reset(trainer)
        # As if the optimizer were kept between two runs.
        trainer.context.optimizers.append(optimizer)
        trainer.fit(Blobs().train_data(1))
        assert trainer.optimizer is optimizer
        torch.testing.assert_close(optimizer.state[trainer.model.head.weight]["start"], begin, rtol=0, atol=0)


def test_a_local_model_is_not_pulled() -> None:
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer, context, strategy = FedMosOptimizer([weight], lr=0.5, mu=0.5), TrainingContext(), FedMosUpdateStrategy()
    for is_detached, expected in [(True, 0.5), (False, 0.5)]:
        context.run.is_detached = is_detached
        weight.grad = torch.tensor(1.0)
        strategy.on_gradients(optimizer, context)
        optimizer.step()
        assert weight.item() == expected


def test_accumulated_batches_equal_one_large_batch() -> None:
    def run(batch_size: int, **options: Any) -> dict[str, Tensor]:
        clipping = GradientClippingStepStrategy(max_norm=0.2, base_strategy=FedMosStepStrategy())
        optimizer = FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05)
        return _trained(optimizer, clipping, batch_size=batch_size, **options)

    torch.testing.assert_close(run(4, accumulation_steps=3), run(12), rtol=0, atol=1e-12)


def test_a_shorter_last_window_is_one_batch() -> None:
    def run(batch_size: int, step: TrainingStepStrategy) -> dict[str, Tensor]:
        return _trained(FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05), step, batch_size=batch_size)

    # Windows of 20 and 4.
    ours = run(4, FedMosStepStrategy(base_strategy=GradientAccumulationStepStrategy(5)))
    torch.testing.assert_close(ours, run(20, FedMosStepStrategy()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_inside", [False, True])
def test_fedmos_trains_in_mixed_precision(is_inside: bool) -> None:
    inside = None if is_inside else FedMosStepStrategy()
    mixed = MixedPrecisionStepStrategy(enabled=True, precision="bf16", base_strategy=inside)
    step = FedMosStepStrategy(base_strategy=mixed) if is_inside else mixed
    optimizer = FedMosOptimizerStrategy(lr=0.1, a=0.3, mu=0.05)
    torch.testing.assert_close(_trained(optimizer, step), _trained(optimizer, FedMosStepStrategy()), rtol=0, atol=0.1)


def test_batchnorm_statistics_equal_a_plain_step() -> None:
    def run(a: float) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        model[0].requires_grad_(False)
        optimizer = FedMosOptimizerStrategy(lr=0.1, a=a, mu=0.0)
        trainer = ComposableTrainer(
            model, optimizer_strategy=optimizer, training_step_strategy=FedMosStepStrategy(), verbose=False
        )
        trainer.fit(Blobs().train_data(1))
        return model

    torch.testing.assert_close(dict(run(0.3).named_buffers()), dict(run(1.0).named_buffers()), rtol=0, atol=0)


def test_parameter_groups_keep_their_rates_and_clipping_works() -> None:
    groups = ParameterGroupOptimizerStrategy(
        torch.optim.Adam,
        lambda model: [{"params": model.body.parameters(), "lr": 0.2}, {"params": model.head.parameters()}],
        default_lr=0.3,
    )
    clipped = GradientClippingOptimizerStrategy(groups, max_norm=0.01)
    optimizer = FedMosOptimizerStrategy(base_strategy=clipped).create_optimizer(mlp(), TrainingContext())
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3]
    start = _trained(FedMosOptimizerStrategy(lr=0.0, a=1.0, mu=0.0))
    moved = _trained(FedMosOptimizerStrategy(1.0, 1.0, 0.0, base_strategy=clipped), batch_size=24, epochs=1)
    way = sum((moved[name] - value).square().sum() for name, value in start.items()).sqrt()
    assert way.item() == pytest.approx(0.01, rel=1e-3)


def test_the_fedprox_term_is_in_both_gradients() -> None:
    both = federation(CompositeAlgorithm([FedMos(a=0.0, mu=0.0), FedProx(mu=0.5)]), trainer=_whole_batches())
    plain = federation(FedProx(mu=0.5), trainer=_whole_batches())
    torch.testing.assert_close(both.weights, plain.weights, rtol=0, atol=1e-12)


def _whole_batches() -> ComposableTrainer:
    optimizer = SGDOptimizerStrategy(lr=0.1)
    return ComposableTrainer(optimizer_strategy=optimizer, num_epochs=4, batch_size=100, verbose=False)


def test_the_configuration_sets_a_and_mu() -> None:
    context = TrainingContext()
    context.config |= {"algorithm": {"a": 0.25, "mu": 0.125}, "lr": 0.5}
    made = FedMosOptimizerStrategyFromConfig().create_optimizer(mlp(), context)
    assert {name: made.param_groups[0][name] for name in ("lr", "a", "mu")} == {"lr": 0.5, "a": 0.25, "mu": 0.125}


def test_fedmos_is_rejected_with_another_algorithm_that_computes_batches() -> None:
    with pytest.raises(ConfigError, match="FedMos and FedSAM both decide how a batch is computed"):
        CompositeAlgorithm([FedMos(), FedSAM()])


@pytest.mark.parametrize("given", [{"a": 1.5}, {"mu": -0.1}, {"a": float("nan")}])
def test_fedmos_rejects_invalid_arguments(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected a number from 0 to 1"):
        FedMos(**given)
