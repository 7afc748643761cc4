"""SCAFFOLD: control variates, by its paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import Blobs, federation, mlp, toy

from dovetail.algorithms import SCAFFOLD, FedAvg, SCAFFOLDUpdateStrategy, SCAFFOLDUpdateStrategyV2
from dovetail.clients.simple import Client
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.scaffold import _option_two
from dovetail.federated.data.sources import Datasource
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import LinearLRSchedulerStrategy, SGDOptimizerStrategy


class TestOptionTwo(AlgorithmContract):
    vectorizes = True

    def make(self) -> SCAFFOLD:
        return SCAFFOLD()


class TestOptionOne(AlgorithmContract):
    vectorizes = True

    def make(self) -> SCAFFOLD:
        return SCAFFOLD(option=1)


class TestStrategy(ModelUpdateStrategyContract):
    def make(self) -> SCAFFOLDUpdateStrategy:
        return SCAFFOLDUpdateStrategy()


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_reaches_the_optimum_of_the_toy_problem(option: int) -> None:
    assert toy(SCAFFOLD(option=option), rounds=40).weights["w"].item() == pytest.approx(0.25, abs=1e-12)


class _Alike(Datasource):
    """Every client has the same data."""

    num_clients = 3

    def train_data(self, client_id: int) -> Any:
        return Blobs().train_data(1)


@pytest.mark.parametrize("option", [1, 2])
def test_with_equal_clients_scaffold_is_fedavg(option: int) -> None:
    # Whole batches: c and c_i are the same gradient then.
    def trainer() -> ComposableTrainer:
        strategy = SGDOptimizerStrategy(lr=0.1)
        return ComposableTrainer(optimizer_strategy=strategy, num_epochs=3, batch_size=100, verbose=False)

    runs = [federation(it, data=_Alike(), trainer=trainer()) for it in (SCAFFOLD(option=option), FedAvg())]
    torch.testing.assert_close(runs[0].weights, runs[1].weights, rtol=0, atol=1e-12)


def _trained(strategy: SCAFFOLDUpdateStrategy, **options: Any) -> tuple[ComposableTrainer, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = mlp()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    options = {"optimizer_strategy": SGDOptimizerStrategy(lr=0.1), "num_epochs": 2, "batch_size": 8, **options}
    trainer = ComposableTrainer(model, model_update_strategy=strategy, verbose=False, **options)
    trainer.fit(Blobs().train_data(1))
    return trainer, before


def test_the_first_control_variate_is_the_mean_gradient_of_the_run() -> None:
    trainer, before = _trained(SCAFFOLDUpdateStrategy())
    steps = trainer.context.progress.updates
    assert steps == 8
    now = dict(trainer.model.named_parameters())
    expected = {name: (value - now[name].detach()) / (steps * 0.1) for name, value in before.items()}
    torch.testing.assert_close(trainer.context.client.state["scaffold"], expected, rtol=0, atol=1e-12)


def test_a_schedule_is_weighted_by_the_sum_of_its_rates() -> None:
    schedule = LinearLRSchedulerStrategy(start_factor=1.0, end_factor=0.5, total_iters=1)
    trainer, before = _trained(SCAFFOLDUpdateStrategy(), lr_scheduler_strategy=schedule)
    travelled = 4 * 0.1 + 4 * 0.05
    now = dict(trainer.model.named_parameters())
    expected = {name: (value - now[name].detach()) / travelled for name, value in before.items()}
    torch.testing.assert_close(trainer.context.client.state["scaffold"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch_size", [8, 100])
def test_option_one_uses_the_full_gradient_at_the_start(batch_size: int) -> None:
    trainer, _ = _trained(SCAFFOLDUpdateStrategyV2(), batch_size=batch_size)
    torch.manual_seed(0)
    model = mlp()
    x, y = Blobs().train_data(1)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    torch.testing.assert_close(trainer.context.client.state["scaffold"], expected, rtol=0, atol=1e-12)


def test_option_one_does_not_change_the_model() -> None:
    looked, _ = _trained(SCAFFOLDUpdateStrategyV2(), optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9))
    plain, _ = _trained(SCAFFOLDUpdateStrategy(), optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9))
    assert all(torch.equal(it, plain.model.state_dict()[name]) for name, it in looked.model.state_dict().items())


def test_the_server_variate_is_the_mean_over_all_clients() -> None:
    server = federation(SCAFFOLD(), rounds=1, per_round=1)
    (asked,) = server.records[0].reported
    own = server.states.get(asked)["scaffold"]
    expected = {name: value / 4 for name, value in own.items()}
    torch.testing.assert_close(server.algorithm.state_dict()["control"], expected, rtol=0, atol=1e-15)


def test_every_client_has_an_equal_weight() -> None:
    server = federation(SCAFFOLD(), rounds=1)
    deltas = []
    for client_id in range(1, 5):
        alone = federation(SCAFFOLD(), rounds=1)
        alone.members = [client_id]
        alone.current_round, alone.records = 0, []
        alone.weights = {name: value.clone() for name, value in server._initial_model.state_dict().items()}
        alone.states.clear()
        alone.algorithm.control = {}
        alone.run()
        deltas.append(alone.weights["head.bias"] - server._initial_model.state_dict()["head.bias"])
    moved = server.weights["head.bias"] - server._initial_model.state_dict()["head.bias"]
    torch.testing.assert_close(moved, torch.stack(deltas).mean(dim=0), rtol=0, atol=1e-12)


def test_the_server_rate_scales_the_move() -> None:
    whole, half = (federation(SCAFFOLD(server_learning_rate=rate), rounds=1) for rate in (1.0, 0.5))
    start = whole._initial_model.state_dict()
    for name, value in start.items():
        torch.testing.assert_close(half.weights[name] - value, (whole.weights[name] - value) / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("given", "said"), [({"option": 3}, "1 or 2"), ({"server_learning_rate": 0}, "above 0")])
def test_scaffold_rejects_invalid_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SCAFFOLD(**given)


def test_a_client_without_a_server_corrects_nothing() -> None:
    corrected, _ = _trained(SCAFFOLDUpdateStrategy())
    torch.manual_seed(0)
    strategy = SGDOptimizerStrategy(lr=0.1)
    plain = ComposableTrainer(mlp(), optimizer_strategy=strategy, num_epochs=2, batch_size=8, verbose=False)
    plain.fit(Blobs().train_data(1))
    assert all(torch.equal(it, plain.model.state_dict()[name]) for name, it in corrected.model.state_dict().items())


def test_scaffold_is_registered_by_its_class() -> None:
    assert isinstance(Client(algorithm=SCAFFOLD()).algorithm, SCAFFOLD)


def test_a_client_without_steps_keeps_its_control_variate() -> None:
    own, zero = {"w": torch.tensor([2.0])}, {"w": torch.tensor([0.0])}
    server = {"w": torch.tensor([1.0])}
    assert _option_two(own, server, zero, zero, torch.tensor(0.0))["w"] == 2
    assert _option_two(own, server, zero, zero, torch.tensor(0.5))["w"] == 1


@pytest.mark.parametrize("option", [1, 2])
def test_the_personalization_round_neither_corrects_nor_changes_the_variate(option: int) -> None:
    server = federation(SCAFFOLD(option=option))
    before = server.states.get(1)["scaffold"]["head.bias"].clone()
    found = server.personalize(epochs=2)
    plain = federation(FedAvg(), rounds=1)
    plain.weights, plain.current_round = server.weights, server.current_round
    assert found.metrics == plain.personalize(epochs=2).metrics
    assert torch.equal(server.states.get(1)["scaffold"]["head.bias"], before)
