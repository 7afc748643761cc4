"""FedBABU: the head is not trained until the personalization round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toy import Blobs, federation, mlp

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedbabu import FedBABU, FedBABUUpdateStrategy, FedBABUUpdateStrategyFromConfig
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract
from dovetail.trainers.context import TrainingContext


class TestFedBABU(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedBABU:
        return FedBABU()


@pytest.mark.torture
class TestFinetuningAll(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedBABU:
        return FedBABU(local_layer_names="2", finetune="all")


class TestStrategy(ModelUpdateStrategyContract):
    def make(self) -> FedBABUUpdateStrategy:
        return FedBABUUpdateStrategy(["0"], ["2"])


class TestFromConfig(ModelUpdateStrategyContract):
    def make(self) -> FedBABUUpdateStrategyFromConfig:
        return FedBABUUpdateStrategyFromConfig()


def test_rounds_train_the_body_and_keep_the_initial_head() -> None:
    server = federation(FedBABU())
    first = server._initial_model.state_dict()
    moved = {name for name, value in server.weights.items() if not torch.equal(value, first[name])}
    assert moved == {"body.weight", "body.bias"}


def test_the_head_is_shared_and_never_kept_by_a_client() -> None:
    server = federation(FedBABU())
    assert all(server.states.get(client_id) == {} for client_id in range(1, 5))


@pytest.mark.parametrize(
    ("finetune", "kept"),
    [("head", {"head.weight", "head.bias"}), ("all", {"head.weight", "head.bias", "body.weight", "body.bias"})],
)
def test_the_personalization_round_creates_a_local_model(finetune: Any, kept: set[str]) -> None:
    server = federation(FedBABU(finetune=finetune))
    before = dict(server.weights)
    found = server.personalize(epochs=4)
    own = server.states.get(2)["personal"]
    assert own.keys() == kept
    assert all(not torch.equal(own[name], before[name]) for name in kept)
    assert server.weights == before
    model = mlp()
    model.load_state_dict({**before, **own})
    x, y = Blobs().test_data(2)
    assert found.metrics[2]["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), abs=1e-12)
    assert server.evaluate_clients().metrics == found.metrics


def test_a_round_after_personalization_starts_from_the_global_model() -> None:
    once, twice = federation(FedBABU(), rounds=1), federation(FedBABU(), rounds=2)
    once.personalize(epochs=3)
    once.config = twice.config
    once.run()
    torch.testing.assert_close(once.weights, twice.weights, rtol=0, atol=0)
    assert all(once.states.get(client_id) == {} for client_id in range(1, 5))


def test_the_configuration_chooses_the_fine_tuned_layers() -> None:
    context = TrainingContext(mlp())
    context.config |= {"algorithm": {"local_layer_names": "head", "finetune": "all"}, "rounds": 1}
    strategy = FedBABUUpdateStrategyFromConfig()
    trained = []
    for context.current_round in (1, 2):
        strategy.on_train_start(context)
        trained.append([name for name, it in context.model.named_parameters() if it.requires_grad])
    assert trained == [["body.weight", "body.bias"], ["body.weight", "body.bias", "head.weight", "head.bias"]]


@pytest.mark.parametrize("kind", [FedBABU, FedBABUUpdateStrategy])
def test_layers_that_cannot_be_fine_tuned_are_rejected(kind: Any) -> None:
    with pytest.raises(ConfigError, match="finetune"):
        kind(finetune="heads")
