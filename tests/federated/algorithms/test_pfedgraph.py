"""pFedGraph: means over a graph of clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, federation, mlp

from dovetail.algorithms import SCAFFOLD, CompositeAlgorithm, FedAvg, FedProxLossStrategy
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.ditto import Ditto
from dovetail.federated.algorithms.pfedgraph import (
    PFedGraph,
    PFedGraphLossStrategy,
    PFedGraphUpdateStrategy,
    onto_simplex,
)
from dovetail.federated.averaging import weighted_mean
from dovetail.federated.messages import Update
from dovetail.testing import AlgorithmContract, LossStrategyContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import SGDOptimizerStrategy


class TestPFedGraph(AlgorithmContract):
    def make(self) -> PFedGraph:
        return PFedGraph(lam=0.1)


class TestUpdateStrategy(ModelUpdateStrategyContract):
    def make(self) -> PFedGraphUpdateStrategy:
        return PFedGraphUpdateStrategy()


class TestLoss(LossStrategyContract):
    def make(self) -> PFedGraphLossStrategy:
        return PFedGraphLossStrategy(lam=0.5)


@pytest.mark.parametrize(
    ("point", "nearest"),
    [
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        ([1.0, 1.0, 1.0], [1 / 3, 1 / 3, 1 / 3]),
        ([0.9, 0.5, -1.0], [0.7, 0.3, 0.0]),
        ([2.0, 0.5], [1.0, 0.0]),
        ([-3.0, -5.0, -3.5], [0.75, 0.0, 0.25]),
        ([7.0], [1.0]),
    ],
)
def test_the_projection_onto_the_simplex_has_known_answers(point: list[float], nearest: list[float]) -> None:
    assert onto_simplex(torch.tensor(point, dtype=torch.float64)).tolist() == pytest.approx(nearest, abs=1e-15)


def test_no_random_point_of_the_simplex_is_nearer_than_the_projection() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        point = torch.randn(5, dtype=torch.float64)
        found = onto_simplex(point)
        others = torch.distributions.Dirichlet(torch.ones(5, dtype=torch.float64)).sample((200,))
        assert found.sum().item() == pytest.approx(1.0, abs=1e-12)
        # The whole convex set is behind the tangent plane at its nearest point.
        assert ((others - found) @ (point - found)).max() <= 1e-12


def _weights(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def _update(client_id: int, num_samples: int, *change: float) -> Update:
    return Update(client_id, 1, num_samples, 1, _weights(*change))


def test_rows_of_the_graph_solve_the_problem_of_the_paper() -> None:
    algorithm = PFedGraph(alpha=0.8)
    # Two that agree, and one at a right angle: cosines of 1, 1 and 0.
    updates = [_update(1, 10, 1.0, 0.0), _update(2, 30, 2.0, 0.0), _update(3, 10, 0.0, 1.0)]
    after = algorithm.aggregate(_weights(5.0, 5.0), updates, weighted_mean)
    # 0.2 + 0.625, 0.6 + 0.625 and 0.2; and for the third 0.2, 0.6 and 0.2 + 0.625.
    expected = {
        1: {1: 0.3, 2: 0.7, 3: 0.0},
        2: {1: 0.3, 2: 0.7, 3: 0.0},
        3: {1: 0.0, 2: 0.3875, 3: 0.6125},
    }
    for client_id, row in algorithm.graph.items():
        assert row == pytest.approx(expected[client_id], abs=1e-12)
    own = {client_id: algorithm.payload(client_id)["pfedgraph"]["w"].tolist() for client_id in (1, 2, 3)}
    assert own[1] == own[2] == pytest.approx([5 + 0.3 + 1.4, 5.0], abs=1e-12)
    assert own[3] == pytest.approx([5 + 2 * 0.3875, 5 + 0.6125], abs=1e-12)
    mean = [(40 * one + 10 * other) / 50 for one, other in zip(own[1], own[3], strict=True)]
    assert after["w"].tolist() == pytest.approx(mean, abs=1e-12)


def test_clients_are_compared_by_the_named_layers() -> None:
    model = nn.ModuleDict({"body": nn.Linear(1, 1, bias=False), "head": nn.Linear(1, 1, bias=False)})
    state = dict(model.state_dict())

    def update(client_id: int, body: float, head: float) -> Update:
        delta = {"body.weight": torch.tensor([[body]]), "head.weight": torch.tensor([[head]])}
        return Update(client_id, 1, 10, 1, delta)

    algorithm = PFedGraph(alpha=0.1, layers="head")
    algorithm.prepare(model, 2)
    algorithm.aggregate(state, [update(1, 1.0, 1.0), update(2, -9.0, 1.0)], weighted_mean)
    assert algorithm.graph[1] == pytest.approx({1: 0.5, 2: 0.5}, abs=1e-6)


def test_an_unknown_layer_is_rejected() -> None:
    with pytest.raises(ConfigError, match="layers: 'fc' matches nothing; the model has body"):
        PFedGraph(layers="fc").prepare(mlp(), 4)


def test_with_sample_shares_alone_pfedgraph_is_fedavg() -> None:
    graph, plain = federation(PFedGraph(lam=0.0, alpha=1e9)), federation(FedAvg())
    torch.testing.assert_close(graph.weights, plain.weights, rtol=0, atol=1e-8)


def test_with_similarity_alone_every_client_uses_only_its_model() -> None:
    server = federation(PFedGraph(lam=0.0, alpha=1e-9))
    for client_id, row in server.algorithm.graph.items():
        assert row == {it: float(it == client_id) for it in range(1, 5)}


def test_a_client_starts_and_is_evaluated_with_its_personal_model() -> None:
    server = federation(PFedGraph(alpha=0.1))
    model = mlp()
    for client_id, metrics in server.evaluate_clients().metrics.items():
        model.load_state_dict(server.algorithm.payload(client_id)["pfedgraph"])
        x, y = Blobs().test_data(client_id)
        assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), abs=1e-12)


def test_pfedgraph_works_with_scaffold() -> None:
    # With the shares of samples, and clients that are all asked, it adds nothing to SCAFFOLD but the model of all.
    data = Blobs((16, 16, 16))
    both = federation(CompositeAlgorithm([SCAFFOLD(), PFedGraph(lam=0.0, alpha=1e9)]), data=data)
    torch.testing.assert_close(both.weights, federation(SCAFFOLD(), data=data).weights, rtol=0, atol=1e-8)


def test_the_server_compares_the_last_model_of_each_client() -> None:
    # A rate of zero: every client ends with its initial weights.
    still = ComposableTrainer(optimizer_strategy=SGDOptimizerStrategy(lr=0.0), num_epochs=1, verbose=False)
    server = federation(PFedGraph(), trainer=still, rounds=2)
    start = server._initial_model.state_dict()
    torch.testing.assert_close(server.weights, dict(start), rtol=0, atol=1e-12)
    assert all(not it["change"]["head.weight"].any() for it in server.algorithm.state_dict()["clients"].values())


def test_a_client_without_updates_gets_the_global_model() -> None:
    server = federation(PFedGraph(), rounds=1, per_round=2)
    asked = set(server.records[0].reported)
    for client_id in range(1, 5):
        assert bool(server.algorithm.payload(client_id)) == (client_id in asked)
    assert set(server.algorithm.graph) == asked


def test_proximal_algorithms_use_the_personal_model_as_anchor() -> None:
    own = {name: torch.full_like(value, 0.25) for name, value in mlp().state_dict().items()}
    loss = PFedGraphLossStrategy(lam=0.1, base_loss_fn=FedProxLossStrategy(mu=1.0))
    trainer = ComposableTrainer(
        mlp(),
        loss_strategy=loss,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.0),
        model_update_strategy=PFedGraphUpdateStrategy(),
        verbose=False,
    )
    trainer.context.client.payload = {"pfedgraph": own}
    trainer.fit(Blobs().train_data(1))
    for kept in (loss.anchor, loss.inner.anchor, trainer.model.state_dict()):
        torch.testing.assert_close(kept, own, rtol=0, atol=0)


def test_the_similarity_term_is_the_cosine_over_all_parameters() -> None:
    strategy = PFedGraphLossStrategy(lam=0.5)
    kept = {"a": torch.tensor([[3.0]]), "b": torch.tensor([4.0])}
    now = {"a": torch.tensor([[4.0]]), "b": torch.tensor([3.0])}
    assert strategy.penalty(kept, kept).item() == pytest.approx(-0.5)
    assert strategy.penalty(now, kept).item() == pytest.approx(-0.5 * 24 / 25)


def test_buffers_are_averaged_and_integers_remain_integers() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    server = federation(PFedGraph(), model=lambda: model, data=Blobs((24, 16)))
    assert server.weights["1.num_batches_tracked"].dtype == torch.int64
    assert server.algorithm.payload(1)["pfedgraph"]["1.num_batches_tracked"] > 0


def test_the_state_determines_the_graph() -> None:
    server = federation(PFedGraph(), rounds=2, per_round=2)
    other = PFedGraph()
    other.load_state_dict(server.algorithm.state_dict())
    assert other.graph == server.algorithm.graph


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lam": -1}, "lam: expected a number that is at least 0, got -1"),
        ({"alpha": 0}, "alpha: expected a number above 0, got 0"),
    ],
)
def test_pfedgraph_rejects_invalid_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PFedGraph(**given)


def test_pfedgraph_conflicts_with_ditto() -> None:
    with pytest.raises(ConfigError, match="both decide the client's own model"):
        CompositeAlgorithm([PFedGraph(), Ditto()])
