"""FedDyn: the terms, λ and h, by its paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, Point, Quadratics, federation, half_square, mlp, toy

from dovetail.algorithms import CompositeAlgorithm, FedAvg, FedProx
from dovetail.clients.simple import Client
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.feddyn import (
    FedDyn,
    FedDynLossStrategy,
    FedDynLossStrategyFromConfig,
    FedDynUpdateStrategy,
)
from dovetail.federated.algorithms.scaffold import SCAFFOLD
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.servers.fedavg import Server
from dovetail.testing import AlgorithmContract, LossStrategyContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import reset
from dovetail.trainers.strategies import (
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    SGDOptimizerStrategy,
)


class TestFedDyn(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedDyn:
        return FedDyn(alpha=0.5)


@pytest.mark.torture
class TestAdaptive(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedDyn:
        return FedDyn(alpha=0.5, adaptive_alpha=True)


class TestLoss(LossStrategyContract):
    def make(self) -> FedDynLossStrategy:
        return FedDynLossStrategy(alpha=0.5)


class TestLossFromConfig(LossStrategyContract):
    def make(self) -> FedDynLossStrategyFromConfig:
        return FedDynLossStrategyFromConfig()


class TestUpdate(ModelUpdateStrategyContract):
    def make(self) -> FedDynUpdateStrategy:
        return FedDynUpdateStrategy()

    def make_options(self) -> dict[str, Any]:
        return {"loss_strategy": FedDynLossStrategy(alpha=0.5)}


def test_feddyn_reaches_the_optimum_of_the_toy_problem() -> None:
    assert toy(FedDyn(alpha=0.5), start=1.0, rounds=60).weights["w"].item() == pytest.approx(0.25, abs=1e-5)


class _Unequal(Quadratics):
    """The second client has its sample three times: the optimum by samples is at (−2 + 9) / 10."""

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        x, y = super().train_data(client_id)
        times = 1 if client_id == 1 else 3
        return x.repeat(times, 1), y.repeat(times)


def test_adaptive_alpha_reaches_the_sample_weighted_optimum() -> None:
    optimizer = SGDOptimizerStrategy(lr=0.05)
    trainer = ComposableTrainer(loss_strategy=half_square, optimizer_strategy=optimizer, num_epochs=10, verbose=False)
    algorithm = FedDyn(alpha=0.5, adaptive_alpha=True)
    server = Server(Point(1.0), _Unequal(), algorithm, trainer=trainer, rounds=60, per_round=2, total_clients=2)
    server.run(Client(trainer=trainer))
    assert server.weights["w"].item() == pytest.approx(0.7, abs=1e-4)


def test_a_client_receives_its_size_relative_to_the_average() -> None:
    algorithm = FedDyn(adaptive_alpha=True)
    algorithm.prepare(Point(), num_clients=3)
    assert algorithm.payload(1)["feddyn"]["relative_size"] == 1
    updates = [Update(k, 1, n, delta={"w": torch.tensor(0.0)}) for k, n in [(1, 10), (2, 50)]]
    algorithm.aggregate({"w": torch.tensor(0.0)}, updates, weighted_mean)
    sizes = [float(algorithm.payload(client_id)["feddyn"]["relative_size"]) for client_id in (1, 2, 3)]
    assert sizes == pytest.approx([1 / 3, 5 / 3, 1.0])
    assert FedDyn().payload(1) == {}


def _moved_model(strategy: FedDynLossStrategy, context: TrainingContext) -> None:
    strategy.on_train_start(context)
    with torch.no_grad():
        for value in strategy.anchor["start"]:
            context.model.get_parameter(value).add_(torch.randn(()))


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("relative_size", [None, 4.0])
def test_the_feddyn_gradient_has_the_linear_and_the_quadratic_term(relative_size: float | None) -> None:
    torch.manual_seed(0)
    model = mlp()
    context = TrainingContext(model)
    pull = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    context.client.state["feddyn"] = pull
    if relative_size is not None:
        context.client.payload = {"feddyn": {"relative_size": torch.tensor(relative_size, dtype=torch.float64)}}
    strategy = FedDynLossStrategy(alpha=0.3, adaptive_alpha=True)
    _moved_model(strategy, context)
    x, y = Blobs().train_data(1)
    task = _gradients(model, nn.functional.cross_entropy(model(x), y))
    ours = _gradients(model, strategy.compute_loss(model(x), y, context))
    alpha = 0.3 / (relative_size or 1.0)
    for (name, value), gradient, of_task in zip(model.named_parameters(), ours, task, strict=True):
        away = value.detach() - strategy.anchor["start"][name]
        torch.testing.assert_close(gradient, of_task + alpha * (pull[name] + away), rtol=0, atol=1e-12)


def _trainer(alpha: float = 0.5, **options: Any) -> ComposableTrainer:
    torch.manual_seed(0)
    settings = {"optimizer_strategy": SGDOptimizerStrategy(lr=0.1, momentum=0.9), "num_epochs": 2, "batch_size": 8}
    return ComposableTrainer(
        mlp(),
        loss_strategy=FedDynLossStrategy(alpha=alpha),
        model_update_strategy=FedDynUpdateStrategy(),
        verbose=False,
        **{**settings, **options},
    )


def _copied(trainer: ComposableTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def test_lambda_is_the_sum_of_all_moves_of_the_client() -> None:
    trainer = _trainer()
    places = [_copied(trainer)]
    for _ in range(2):
        reset(trainer)
        trainer.fit(Blobs().train_data(1))
        places.append(_copied(trainer))
    expected = {name: places[2][name] - value for name, value in places[0].items()}
    torch.testing.assert_close(trainer.context.client.state["feddyn"], expected, rtol=0, atol=1e-12)
    # The second run was measured from its start, not from the start of the first one.
    torch.testing.assert_close(trainer.strategies.loss.anchor["start"], places[1], rtol=0, atol=0)


def test_a_resumed_client_run_is_counted_once() -> None:
    parts, whole = _trainer(), _trainer()
    for epochs in (1, 2):
        parts.options.num_epochs = epochs
        parts.fit(Blobs().train_data(1))
    whole.fit(Blobs().train_data(1))
    torch.testing.assert_close(parts.context.client.state, whole.context.client.state, rtol=0, atol=0)


def test_an_alpha_near_0_trains_as_fedavg() -> None:
    ours = _trainer(alpha=1e-12)
    ours.fit(Blobs().train_data(1))
    torch.manual_seed(0)
    optimizer = SGDOptimizerStrategy(lr=0.1, momentum=0.9)
    plain = ComposableTrainer(mlp(), optimizer_strategy=optimizer, num_epochs=2, batch_size=8, verbose=False)
    plain.fit(Blobs().train_data(1))
    torch.testing.assert_close(ours.model.state_dict(), plain.model.state_dict(), rtol=0, atol=1e-9)


def test_every_client_has_a_lambda_and_h_is_their_mean() -> None:
    server = federation(FedDyn(alpha=0.5), per_round=2)
    # A client without a round has not moved.
    kept = [state["feddyn"] for it in range(1, 5) if "feddyn" in (state := server.states.get(it))]
    assert len(kept) > 2
    for name, h in server.algorithm.state_dict()["h"].items():
        mean = torch.stack([each[name] for each in kept]).sum(dim=0) / 4
        torch.testing.assert_close(h, -0.5 * mean, rtol=0, atol=1e-12)


def test_the_personalization_round_does_not_change_lambda() -> None:
    server = federation(FedDyn(alpha=0.5))
    before = server.states.get(1)["feddyn"]
    server.personalize(epochs=1)
    torch.testing.assert_close(server.states.get(1)["feddyn"], before, rtol=0, atol=0)


def test_clients_have_equal_weights_and_buffers_are_averaged() -> None:
    model = nn.BatchNorm1d(1)
    algorithm = FedDyn(alpha=0.5)
    algorithm.prepare(model, num_clients=4)
    values = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 3}
    start = {name: torch.tensor([value]) for name, value in values.items()}
    deltas = [{name: torch.ones_like(value) * k for name, value in start.items()} for k in (1, 3)]
    updates = [Update(k, 1, 10**k, delta=delta) for k, delta in enumerate(deltas, start=1)]
    after = algorithm.aggregate(start, updates, weighted_mean)
    # The mean moves by 2, and the mean of all λ is (1 + 3) / 4.
    assert {name: value.item() for name, value in after.items()} == {
        "weight": 4.0,
        "bias": 3.0,
        "running_mean": 2.0,
        "running_var": 3.0,
        "num_batches_tracked": 5,
    }
    assert algorithm.h == {"weight": torch.tensor([-0.5]), "bias": torch.tensor([-0.5])}


def _weights(**options: Any) -> dict[str, Tensor]:
    trainer = _trainer(**options)
    x, y = Blobs().train_data(1)
    for _ in range(2):
        reset(trainer)
        trainer.fit((x[:24], y[:24]))
    return trainer.model.state_dict()


def test_accumulated_batches_equal_one_large_batch() -> None:
    accumulating = GradientAccumulationStepStrategy(3, base_strategy=GradientClippingStepStrategy(max_norm=0.5))
    small = _weights(batch_size=4, training_step_strategy=accumulating)
    large = _weights(batch_size=12, training_step_strategy=GradientClippingStepStrategy(max_norm=0.5))
    torch.testing.assert_close(small, large, rtol=0, atol=1e-12)


def test_feddyn_trains_in_mixed_precision() -> None:
    mixed = _weights(training_step_strategy=MixedPrecisionStepStrategy(enabled=True, precision="bf16"))
    torch.testing.assert_close(mixed, _weights(), rtol=0, atol=0.1)


def test_feddyn_and_fedprox_terms_add_up() -> None:
    both = federation(CompositeAlgorithm([FedProx(mu=0.0), FedDyn(alpha=0.5)]))
    torch.testing.assert_close(both.weights, federation(FedDyn(alpha=0.5)).weights, rtol=0, atol=1e-12)
    assert not torch.equal(both.weights["head.bias"], federation(FedAvg()).weights["head.bias"])


def test_feddyn_is_rejected_with_another_drift_correction() -> None:
    with pytest.raises(ConfigError, match="SCAFFOLD and FedDyn both decide the drift of clients"):
        CompositeAlgorithm([SCAFFOLD(), FedDyn()])


@pytest.mark.parametrize("key", ["feddyn_alpha", "alpha_coef"])
def test_the_configuration_sets_alpha(key: str) -> None:
    strategy, context = FedDynLossStrategyFromConfig(), TrainingContext(mlp())
    context.config["algorithm"] = {key: 0.25}
    strategy.on_train_start(context)
    assert strategy.alpha == 0.25


def test_an_invalid_alpha_is_rejected() -> None:
    with pytest.raises(ConfigError, match="alpha: expected a number above 0, got 0"):
        FedDyn(alpha=0)
    strategy, context = FedDynLossStrategyFromConfig(), TrainingContext(mlp())
    context.config["algorithm"] = {"feddyn_alpha": -1}
    with pytest.raises(ConfigError, match="alpha: expected a number above 0, got -1"):
        strategy.on_train_start(context)
