"""A part of the model at a time: what stands still, and when it moves again."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, federation, mlp

from dovetail.algorithms import CompositeAlgorithm, FedAvg
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedbabu import FedBABU
from dovetail.federated.algorithms.fedper import FedPer
from dovetail.federated.algorithms.fedrep import FedRep
from dovetail.federated.algorithms.finetune import FedAvgFinetune
from dovetail.federated.algorithms.lg_fedavg import LGFedAvg
from dovetail.federated.algorithms.partial import PartialUpdateStrategy
from dovetail.federated.callbacks import ServerCallback
from dovetail.testing import ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import reset
from dovetail.trainers.strategies import SGDOptimizerStrategy
from dovetail.trainers.strategies.nesting import Described


@dataclass(eq=False, repr=False)
class _Still(Described, PartialUpdateStrategy):
    """Trains everything but one part."""

    part: Any = "global"

    def still(self, context: Any) -> Any:
        return self.part


class TestHead(ModelUpdateStrategyContract):
    def make(self) -> _Still:
        return _Still("global")


class TestBody(ModelUpdateStrategyContract):
    def make(self) -> _Still:
        return _Still("local")


class TestAll(ModelUpdateStrategyContract):
    def make(self) -> _Still:
        return _Still(None)


def _trainer(strategy: Any, **options: Any) -> ComposableTrainer:
    torch.manual_seed(0)
    optimizer = SGDOptimizerStrategy(lr=0.1, momentum=0.9, weight_decay=0.1)
    requests = {"optimizer_strategy": optimizer, "num_epochs": 2, "batch_size": 8, "verbose": False, **options}
    return ComposableTrainer(mlp(), model_update_strategy=strategy, **requests)


def _moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    ("part", "moves"),
    [
        ("global", {"head.weight", "head.bias"}),
        ("local", {"body.weight", "body.bias"}),
        (None, {"head.weight", "head.bias", "body.weight", "body.bias"}),
    ],
)
def test_momentum_and_weight_decay_do_not_change_frozen_parameters(part: Any, moves: set[str]) -> None:
    strategy = _Still(None)
    trainer = _trainer(strategy)
    trainer.fit(Blobs().train_data(1))
    # The optimizer has momentum for all layers now.
    before = copy.deepcopy(trainer.model.state_dict())
    strategy.part = part
    trainer.options.num_epochs = 4
    trainer.fit(Blobs().train_data(1))
    assert _moved(before, trainer.model) == moves


def test_parameters_frozen_before_remain_frozen_afterwards() -> None:
    trainer = _trainer(_Still("global"))
    trainer.model.body.bias.requires_grad_(False)
    trainer.model.head.bias.requires_grad_(False)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.fit(Blobs().train_data(1))
    flags = {name: value.requires_grad for name, value in trainer.model.named_parameters()}
    assert flags == {"body.weight": True, "body.bias": False, "head.weight": True, "head.bias": False}
    assert _moved(before, trainer.model) == {"head.weight"}


class _Fails(Callback):
    """Ends a run by an error in its third step."""

    def on_step_start(self, context: Any, batch: Any) -> None:
        if context.progress.batches == 2:
            assert not all(it.requires_grad for it in context.model.parameters())
            raise ValueError("no luck")


@pytest.mark.parametrize("optimizer", [{}, {"optimizer_strategy": None, "optimizer": torch.optim.SGD}])
def test_after_an_error_the_whole_model_can_be_trained(optimizer: dict[str, Any]) -> None:
    strategy, failure = _Still("global"), _Fails()
    trainer = _trainer(strategy, callbacks=[failure], **optimizer)
    with pytest.raises(ValueError, match="no luck"):
        trainer.fit(Blobs().train_data(1))
    assert all(it.requires_grad for it in trainer.model.parameters())
    # An optimizer that is made while something is frozen would know nothing of it.
    trainer.context.callbacks.remove(failure)
    reset(trainer)
    strategy.part = "local"
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.fit(Blobs().train_data(1))
    assert _moved(before, trainer.model) == {"body.weight", "body.bias"}


def test_a_copy_of_a_trainer_unfreezes_only_its_model() -> None:
    trainer = copy.deepcopy(_trainer(_Still("global"), callbacks=[_Fails()]))
    with pytest.raises(ValueError, match="no luck"):
        trainer.fit(Blobs().train_data(1))
    assert all(it.requires_grad for it in trainer.model.parameters())


def test_a_closed_trainer_restores_requires_grad() -> None:
    trainer = _trainer(_Still("global"))
    watching = len(trainer.context.callbacks)
    trainer.close()
    assert len(trainer.context.callbacks) == watching - 1


def test_a_frozen_part_equals_one_unknown_to_the_optimizer() -> None:
    ours, theirs = _trainer(_Still("local")), _trainer(None)
    theirs.model.head.requires_grad_(False)
    for trainer in (ours, theirs):
        trainer.fit(Blobs().train_data(1))
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)


def test_a_pattern_without_a_match_raises_at_the_start_of_a_run() -> None:
    strategy = _Still(None)
    strategy.local_layer_names = ["haed"]
    with pytest.raises(ConfigError, match="'haed' matches nothing; the model has body"):
        _trainer(strategy).fit(Blobs().train_data(1))


def test_a_pattern_without_a_match_ends_a_federation_before_its_first_round() -> None:
    with pytest.raises(ConfigError, match="local_layer_names: 'fc' matches nothing"):
        federation(FedPer(local_layer_names="fc"))


# ------------------------------------------------------------------ algorithms that keep layers


class _Sent(ServerCallback):
    """Notes what clients send."""

    def __init__(self) -> None:
        self.deltas: dict[int, Any] = {}

    def on_weights_aggregated(self, server: Any, updates: Any) -> None:
        self.deltas |= {update.client_id: dict(update.delta) for update in updates}


_KEEPING = [FedPer(), FedRep(), LGFedAvg()]
_keeping = pytest.mark.parametrize("algorithm", _KEEPING, ids=repr)


def _heads(server: Any) -> dict[int, dict[str, Tensor]]:
    return {client_id: server.states.get(client_id)["model"] for client_id in range(1, 5)}


@_keeping
def test_heads_differ_between_clients_and_the_global_head_is_unchanged(algorithm: Any) -> None:
    server = federation(algorithm)
    heads = _heads(server)
    assert all(set(head) == {"head.weight", "head.bias"} for head in heads.values())
    weights = [head["head.weight"] for head in heads.values()] + [server.weights["head.weight"]]
    assert all(not torch.equal(one, other) for place, one in enumerate(weights) for other in weights[:place])
    first = server._initial_model.state_dict()
    assert torch.equal(server.weights["head.weight"], first["head.weight"])
    assert not torch.equal(server.weights["body.weight"], first["body.weight"])


@_keeping
def test_heads_are_never_sent(algorithm: Any) -> None:
    sent = _Sent()
    record = federation(algorithm, callbacks=[sent]).records[-1]
    assert all(delta.keys() == {"body.weight", "body.bias"} for delta in sent.deltas.values())
    everything = federation(FedAvg()).records[-1]
    # 5 · 3 + 3 numbers of 8 bytes, for each of four clients.
    assert everything.bytes_up - record.bytes_up == everything.bytes_down - record.bytes_down == 18 * 8 * 4


@_keeping
def test_a_head_continues_in_the_next_round(algorithm: Any) -> None:
    one, two = federation(algorithm, rounds=1), federation(algorithm, rounds=2, per_round=4)
    # The second round starts with the head of this client and the shared body.
    again = federation(algorithm, rounds=1)
    again.config = two.config
    again.run()
    assert again.current_round == 2
    torch.testing.assert_close(_heads(again), _heads(two), rtol=0, atol=0)
    assert not torch.equal(_heads(one)[1]["head.weight"], _heads(two)[1]["head.weight"])


@_keeping
def test_clients_are_evaluated_with_their_heads(algorithm: Any) -> None:
    server = federation(algorithm)
    reported = server.evaluate_clients().metrics[3]["loss"]
    model = mlp()
    model.load_state_dict({**server.weights, **_heads(server)[3]})
    x, y = Blobs().test_data(3)
    assert reported == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), abs=1e-12)


@_keeping
def test_the_personalization_round_trains_and_keeps_only_heads(algorithm: Any) -> None:
    server = federation(algorithm)
    before = _heads(server)
    found = server.personalize(epochs=5)
    after = _heads(server)
    assert all(not torch.equal(before[it]["head.weight"], after[it]["head.weight"]) for it in before)
    # The body is what it was: the global body and the head that is kept are what was judged.
    assert server.evaluate_clients().metrics == found.metrics


@pytest.mark.parametrize("algorithm", [*_KEEPING, FedBABU(), FedAvgFinetune()], ids=repr)
def test_a_configuration_enables_the_personalization_round(algorithm: Any) -> None:
    asked = federation(algorithm)
    before = [asked.states.get(client_id) for client_id in range(1, 5)]
    asked.personalize(epochs=2)
    reported = federation(algorithm, personalization={"epochs": 2})
    states = [[server.states.get(client_id) for client_id in range(1, 5)] for server in (reported, asked)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert reported.personalized == asked.personalized
    with pytest.raises(AssertionError):
        torch.testing.assert_close(states[0], before, rtol=0, atol=0)


@_keeping
def test_only_one_algorithm_may_choose_local_layers(algorithm: Any) -> None:
    with pytest.raises(ConfigError, match="both decide which layers stay with clients"):
        CompositeAlgorithm([algorithm, FedBABU()])


class _Unlucky(Callback):
    """Ends the runs of one client by an error, in the middle of the first epoch."""

    def on_step_end(self, context: Any, output: Any) -> None:
        if context.client_id == 4:
            raise ValueError("no luck")


@pytest.mark.parametrize("algorithm", [*_KEEPING, FedBABU()], ids=repr)
def test_a_failed_client_does_not_affect_the_next_one(algorithm: Any) -> None:
    def run(*callbacks: Any) -> Any:
        # Not a strategy: this one is only given what requires a gradient when it is made.
        make = partial(ComposableTrainer, optimizer=torch.optim.SGD, num_epochs=2, batch_size=8, verbose=False)
        sent = _Sent()
        server = federation(algorithm, trainer=partial(make, callbacks=callbacks), rounds=1, callbacks=[sent])
        return server.records[0], sent.deltas

    record, deltas = run(_Unlucky())
    assert [fault.client_id for fault in record.faults] == [4]
    assert record.selected[-1] != 4
    expected = run()[1]
    assert expected.pop(4)
    torch.testing.assert_close(deltas, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [FedPer, FedRep, FedBABU, LGFedAvg])
def test_the_number_of_layers_must_be_an_integer(kind: Any) -> None:
    with pytest.raises(ConfigError, match="num_local_layers: expected a whole number that is at least 1, got 0"):
        kind(num_local_layers=0)
