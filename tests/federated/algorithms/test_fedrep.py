"""FedRep: first the head, then the body."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Blobs, federation, mlp

from dovetail import checkpoint as store
from dovetail.algorithms import SCAFFOLD, CompositeAlgorithm, FedProx
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError, FederationError
from dovetail.federated.algorithms.fedrep import FedRep, FedRepUpdateStrategy, FedRepUpdateStrategyFromConfig
from dovetail.federated.callbacks import ServerCallback
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import equip
from dovetail.trainers.strategies import SGDOptimizerStrategy
from dovetail.units import Batches


class TestFedRep(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedRep:
        return FedRep(local_epochs=1)


@pytest.mark.torture
class TestFedRepWithFedProx(AlgorithmContract):
    vectorizes = True

    def make(self) -> CompositeAlgorithm:
        return CompositeAlgorithm([FedProx(mu=0.1), FedRep()])


class TestStrategy(ModelUpdateStrategyContract):
    def make(self) -> FedRepUpdateStrategy:
        return FedRepUpdateStrategy(["0"], ["2"])


class TestFromConfig(ModelUpdateStrategyContract):
    def make(self) -> FedRepUpdateStrategyFromConfig:
        return FedRepUpdateStrategyFromConfig()


class _Moves(Callback):
    """Notes which layers every epoch has moved."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []

    def on_epoch_start(self, context: Any) -> None:
        self._before = copy.deepcopy(context.model.state_dict())

    def on_epoch_end(self, context: Any, metrics: Any) -> None:
        after = context.model.state_dict()
        self.found.append({name.split(".")[0] for name in after if not torch.equal(after[name], self._before[name])})


def _trainer(strategy: Any, **options: Any) -> ComposableTrainer:
    torch.manual_seed(0)
    return ComposableTrainer(
        mlp(),
        model_update_strategy=strategy,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9, weight_decay=0.1),
        num_epochs=5,
        batch_size=8,
        verbose=False,
        **options,
    )


@pytest.mark.parametrize("local_epochs", [1, 3, 5])
def test_the_head_trains_in_the_first_epochs_and_the_body_in_the_others(local_epochs: int) -> None:
    moves = _Moves()
    trainer = _trainer(FedRepUpdateStrategy(["body"], ["head"], local_epochs=local_epochs), callbacks=[moves])
    trainer.fit(Blobs().train_data(1))
    assert moves.found == [{"head"}] * local_epochs + [{"body"}] * (5 - local_epochs)
    assert all(it.requires_grad for it in trainer.model.parameters())


def test_a_run_that_ended_with_the_head_continues_with_the_body() -> None:
    moves = _Moves()
    trainer = _trainer(FedRepUpdateStrategy(local_epochs=2), callbacks=[moves])
    for trainer.options.num_epochs in (1, 2, 4):
        trainer.fit(Blobs().train_data(1))
    assert moves.found == [{"head"}, {"head"}, {"body"}, {"body"}]


def test_a_run_resumes_within_either_phase_bit_for_bit(tmp_path: Path) -> None:
    def strategy() -> FedRepUpdateStrategy:
        return FedRepUpdateStrategy(local_epochs=2)

    whole = _trainer(strategy(), checkpoint_dir=tmp_path, save_every=0, save_hist=False)
    whole.fit(Blobs().train_data(1), checkpoint_period=Batches(3))
    saved = store.list_checkpoints(tmp_path)
    # Four batches an epoch: checkpoints are in the middle of epochs 1 to 4.
    assert len(saved) > 5
    for info in saved:
        resumed = _trainer(strategy())
        resumed.fit(Blobs().train_data(1), resume=info.path)
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_the_personalization_round_trains_only_the_head() -> None:
    moves = _Moves()
    trainer = _trainer(FedRepUpdateStrategy(local_epochs=2), callbacks=[moves])
    trainer.context.config["rounds"], trainer.context.current_round = 7, 8
    trainer.fit(Blobs().train_data(1))
    assert moves.found == [{"head"}] * 5


def test_a_round_without_an_epoch_for_the_body_is_rejected() -> None:
    expected = "local_epochs: expected fewer than the epochs of a round, 2, got 2: the body would never be trained"
    with pytest.raises(FederationError, match=f"4 failed; .* ConfigError: {expected}$"):
        federation(FedRep(local_epochs=2), rounds=1)


def test_a_fleet_ends_where_clients_alone_do() -> None:
    trainer = ComposableTrainer(
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9, weight_decay=0.01),
        num_epochs=5,
        batch_size=8,
        verbose=False,
    )
    alone, fleet = (
        federation(FedRep(local_epochs=3), trainer=trainer, backend=it) for it in ("sequential", "vectorized")
    )
    torch.testing.assert_close(fleet.weights, alone.weights, rtol=0, atol=1e-10)
    for client_id in range(1, 5):
        ours, theirs = (server.states.get(client_id)["model"] for server in (fleet, alone))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


class _Counts(ServerCallback):
    """Records how many updates clients report."""

    def on_weights_aggregated(self, server: Any, updates: Any) -> None:
        self.found = {update.client_id: update.num_updates for update in updates}


@pytest.mark.parametrize("backend", ["sequential", "vectorized"])
def test_only_steps_of_the_body_are_counted_as_updates(backend: str) -> None:
    counts = _Counts()
    trainer = ComposableTrainer(num_epochs=5, batch_size=8, verbose=False)
    federation(FedRep(local_epochs=3), trainer=trainer, rounds=1, callbacks=[counts], backend=backend)
    # 25, 7, 40 and 16 samples in batches of 8, in two epochs.
    assert counts.found == {1: 8, 2: 2, 3: 10, 4: 4}


def test_a_proximal_term_does_not_apply_to_the_head() -> None:
    def heads(*others: Any) -> list[Any]:
        server = federation(CompositeAlgorithm([*others, FedRep()]), rounds=1)
        return [server.weights, *(server.states.get(client_id)["model"] for client_id in range(1, 5))]

    plain, held = heads(), heads(FedProx(mu=2.0))
    torch.testing.assert_close(held[1:], plain[1:], rtol=0, atol=0)
    assert not torch.equal(held[0]["body.weight"], plain[0]["body.weight"])


def test_the_control_variate_of_the_body_is_its_mean_gradient() -> None:
    server = federation(CompositeAlgorithm([SCAFFOLD(), FedRep()]), rounds=1, trainer=_plain(), data=Blobs((24,)))
    moved = server._initial_model.state_dict()["body.weight"] - server.weights["body.weight"]
    # One of the two epochs of three batches trains the body.
    torch.testing.assert_close(server.states.get(1)["scaffold"]["body.weight"], moved / (3 * 0.1), rtol=0, atol=1e-12)


def _plain() -> ComposableTrainer:
    return ComposableTrainer(optimizer_strategy=SGDOptimizerStrategy(lr=0.1), num_epochs=2, batch_size=8, verbose=False)


def test_two_algorithms_with_phases_are_rejected() -> None:
    with pytest.raises(ConfigError, match="both divide a run into phases"):
        trainer = _trainer(None)
        algorithm = CompositeAlgorithm([SCAFFOLD(option=1), FedRep()])
        algorithm.prepare(trainer.model, 2)
        equip(trainer, **algorithm.equip(trainer.strategies))
        trainer.fit(Blobs().train_data(1))


def test_the_configuration_names_layers_and_epochs() -> None:
    context = TrainingContext(mlp())
    context.config["algorithm"] = {"local_layer_names": ["body"], "global_layer_names": ["head"], "local_epochs": 3}
    strategy = FedRepUpdateStrategyFromConfig()
    assert [phase.epochs for phase in strategy.phases(4, context)] == [3, 1]
    context.run.phases = tuple(strategy.phases(4, context))
    strategy.on_train_start(context)
    assert [name for name, it in context.model.named_parameters() if it.requires_grad] == ["body.weight", "body.bias"]


@pytest.mark.parametrize("kind", [FedRep, FedRepUpdateStrategy])
def test_fedrep_requires_an_epoch_for_the_head(kind: Any) -> None:
    with pytest.raises(ConfigError, match="local_epochs: expected a whole number that is at least 1, got 0"):
        kind(local_epochs=0)
