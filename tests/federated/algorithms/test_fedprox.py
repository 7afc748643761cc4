"""FedProx: the term, its gradient, and what it is measured from."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, federation, mlp

from dovetail.algorithms import FedAvg, FedProx, FedProxLossStrategy, FedProxLossStrategyFromConfig
from dovetail.errors import ConfigError
from dovetail.testing import AlgorithmContract, LossStrategyContract
from dovetail.trainers.basic import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import reset
from dovetail.trainers.strategies import (
    GradientAccumulationStepStrategy,
    MixedPrecisionStepStrategy,
    SGDOptimizerStrategy,
)


class TestFedProx(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedProx:
        return FedProx(mu=0.5)


class TestStrategy(LossStrategyContract):
    def make(self) -> FedProxLossStrategy:
        return FedProxLossStrategy(mu=0.5)


class TestFromConfig(LossStrategyContract):
    def make(self) -> FedProxLossStrategyFromConfig:
        return FedProxLossStrategyFromConfig()


def _started(strategy: FedProxLossStrategy) -> tuple[nn.Module, TrainingContext]:
    torch.manual_seed(0)
    model = mlp()
    context = TrainingContext(model)
    strategy.on_train_start(context)
    return model, context


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_the_fedprox_gradient_adds_mu_times_the_distance_from_the_start() -> None:
    strategy = FedProxLossStrategy(mu=0.3)
    model, context = _started(strategy)
    start = [value.detach().clone() for value in model.parameters()]
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value))
    x, y = Blobs().train_data(1)
    task = _gradients(model, nn.functional.cross_entropy(model(x), y))
    ours = _gradients(model, strategy.compute_loss(model(x), y, context))
    for gradient, of_task, value, before in zip(ours, task, model.parameters(), start, strict=True):
        torch.testing.assert_close(gradient, of_task + 0.3 * (value.detach() - before), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm_type", ["l2", "l1"])
def test_at_the_start_the_fedprox_gradient_equals_the_task_gradient(norm_type: Any) -> None:
    strategy = FedProxLossStrategy(mu=10.0, norm_type=norm_type)
    model, context = _started(strategy)
    x, y = Blobs().train_data(1)
    task = _gradients(model, nn.functional.cross_entropy(model(x), y))
    ours = _gradients(model, strategy.compute_loss(model(x), y, context))
    assert all(torch.equal(*pair) for pair in zip(ours, task, strict=True))


def test_the_l1_term_is_half_mu_times_the_sum_of_differences() -> None:
    strategy = FedProxLossStrategy(mu=3.0, norm_type="l1")
    away = strategy.penalty({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.0, 2.0])})
    assert away == 7.5


def test_the_distance_is_measured_from_the_start_of_each_run() -> None:
    strategy = FedProxLossStrategy(mu=1.0)
    trainer = ComposableTrainer(mlp(), loss_strategy=strategy, num_epochs=1, batch_size=8, verbose=False)
    starts = []
    for _ in range(2):
        starts.append({name: value.detach().clone() for name, value in trainer.model.named_parameters()})
        reset(trainer)
        trainer.fit(Blobs().train_data(1))
        assert all(torch.equal(value, starts[-1][name]) for name, value in strategy.anchor.items())
    assert not torch.equal(starts[0]["head.bias"], starts[1]["head.bias"])


def test_fedprox_with_mu_0_is_fedavg() -> None:
    torch.testing.assert_close(federation(FedProx(mu=0.0)).weights, federation(FedAvg()).weights, rtol=0, atol=1e-12)


def test_a_large_mu_keeps_clients_near_the_start() -> None:
    def way(mu: float) -> float:
        optimizer = SGDOptimizerStrategy(lr=0.01)
        trainer = ComposableTrainer(optimizer_strategy=optimizer, num_epochs=5, batch_size=8, verbose=False)
        server = federation(FedProx(mu=mu), rounds=1, trainer=trainer)
        start = server._initial_model.state_dict()
        return float(sum((value - start[name]).square().sum() for name, value in server.weights.items()))

    assert way(50.0) < 0.2 * way(0.0)


def test_evaluation_has_no_fedprox_term() -> None:
    server = federation(FedProx(mu=100.0))
    plain = federation(FedAvg(), rounds=1)
    plain.weights = server.weights
    assert server.evaluate_clients().metrics[1]["loss"] == plain.evaluate_clients().metrics[1]["loss"]


def _run(**options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trainer = ComposableTrainer(
        mlp(),
        loss_strategy=FedProxLossStrategy(mu=0.7),
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9),
        num_epochs=3,
        verbose=False,
        **options,
    )
    x, y = Blobs().train_data(1)
    trainer.fit((x[:24], y[:24]))
    return trainer.model.state_dict()


def test_accumulated_batches_equal_one_large_batch() -> None:
    small = _run(batch_size=4, training_step_strategy=GradientAccumulationStepStrategy(3))
    torch.testing.assert_close(small, _run(batch_size=12), rtol=0, atol=1e-12)


def test_fedprox_trains_in_mixed_precision() -> None:
    step = MixedPrecisionStepStrategy(enabled=True, precision="bf16")
    mixed = _run(batch_size=8, training_step_strategy=step)
    torch.testing.assert_close(mixed, _run(batch_size=8), rtol=0, atol=0.05)


def test_fedprox_keeps_the_criterion_of_the_trainer() -> None:
    def squared(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - nn.functional.one_hot(labels, 3)).square().mean()

    make = partial(Trainer, criterion=squared, optimizer=torch.optim.SGD, num_epochs=1, batch_size=8, verbose=False)
    runs = [federation(algorithm, trainer=make) for algorithm in (FedProx(mu=0.0), FedAvg())]
    torch.testing.assert_close(runs[0].weights, runs[1].weights, rtol=0, atol=1e-12)


def test_the_configuration_sets_mu() -> None:
    for key in ("fedprox_mu", "proximal_term_penalty_constant"):
        strategy = FedProxLossStrategyFromConfig()
        context = TrainingContext(mlp())
        context.config["algorithm"] = {key: 0.25}
        strategy.on_train_start(context)
        assert strategy.mu == 0.25


@pytest.mark.parametrize("given", [{"mu": -1.0}, {"norm_type": "l3"}])
def test_fedprox_rejects_invalid_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FedProx(**given)
