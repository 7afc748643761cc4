"""FedALA: what a client takes over from the model of all, by a known answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toy import Blobs, Point, federation, half_square, mlp

from dovetail.algorithms import Algorithm, CompositeAlgorithm, FedAvg, FedProx
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.ditto import Ditto
from dovetail.federated.algorithms.fedala import FedALA, FedALAUpdateStrategy
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import MixedPrecisionStepStrategy, SGDOptimizerStrategy, StepLRSchedulerStrategy
from dovetail.units import Batches


class TestFedALA(AlgorithmContract):
    def make(self) -> FedALA:
        return FedALA(eta=0.5)


@pytest.mark.torture
class TestOfTheHead(AlgorithmContract):
    def make(self) -> Algorithm:
        return CompositeAlgorithm([FedProx(), FedALA(layer_idx=2, threshold=10.0, num_pre_loss=1)])


class TestStrategy(ModelUpdateStrategyContract):
    def make(self) -> FedALAUpdateStrategy:
        return FedALAUpdateStrategy()


# f(w) = a (w - b)² / 2, of five batches.
SAMPLES = [(1.0, -2.0), (3.0, 1.0), (2.0, 0.5), (0.5, 4.0), (1.5, -1.0)]
DATA = torch.tensor(SAMPLES, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)


def _second_round(strategy: FedALAUpdateStrategy, *, local: float, mix: float, has_adapted: bool, **pieces: Any) -> Any:
    """Train from 2, for one epoch of five steps of 0.1, a client that has a last model and a W."""
    trainer = ComposableTrainer(
        Point(2.0),
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9),
        model_update_strategy=strategy,
        num_epochs=1,
        batch_size=1,
        verbose=False,
        **pieces,
    )
    trainer.context.client.state["fedala"] = {
        "local": {"w": torch.tensor(local, dtype=torch.float64)},
        "mix": {"w": torch.tensor(mix, dtype=torch.float64)},
        "has_adapted": torch.tensor(has_adapted),
    }
    return trainer


def _adapted(mix: float, local: float, eta: float, num_batches: int) -> float:
    """W after a pass over the first batches, from the equation."""
    for a, b in SAMPLES[:num_batches]:
        between = local + (2.0 - local) * mix
        mix = min(max(mix - eta * a * (between - b) * (2.0 - local), 0.0), 1.0)
    return mix


def _plainly(start: float) -> float:
    """Where plain training ends from a start."""
    trainer = ComposableTrainer(
        Point(start),
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9),
        num_epochs=1,
        batch_size=1,
        verbose=False,
    )
    trainer.fit(DATA)
    return trainer.model.w.item()


@pytest.mark.parametrize(("percent", "num_batches"), [(80, 4), (100, 5), (1, 1), (50, 3)])
def test_one_adaptation_pass_follows_the_equation_before_training(percent: float, num_batches: int) -> None:
    strategy = FedALAUpdateStrategy(eta=0.05, rand_percent=percent)
    trainer = _second_round(strategy, local=1.0, mix=0.7, has_adapted=True)
    trainer.fit(DATA)
    mix = _adapted(0.7, 1.0, 0.05, num_batches)
    assert 0 < mix < 1
    kept = trainer.context.client.state["fedala"]
    assert kept["mix"]["w"].item() == pytest.approx(mix, abs=1e-14)
    # The momentum starts at zero, unaffected by the adaptation.
    assert kept["local"]["w"].item() == trainer.model.w.item() == pytest.approx(_plainly(1.0 + mix), abs=1e-14)


def test_a_window_of_batches_is_one_step_of_the_mixing_weights() -> None:
    trainer = _second_round(
        FedALAUpdateStrategy(eta=0.1, rand_percent=100), local=1.0, mix=0.7, has_adapted=True, accumulation_steps=5
    )
    trainer.fit(DATA)
    slope = sum(a * (1.7 - b) for a, b in SAMPLES) / 5
    assert trainer.context.client.state["fedala"]["mix"]["w"].item() == pytest.approx(0.7 - 0.1 * slope, abs=1e-14)


def test_the_first_adaptation_stops_after_twenty_passes() -> None:
    strategy = FedALAUpdateStrategy(eta=0.01, rand_percent=100, threshold=0.0)
    trainer = _second_round(strategy, local=1.0, mix=1.0, has_adapted=False)
    trainer.fit(DATA)
    assert trainer.context.progress.epoch == 21
    assert trainer.context.progress.batches == 21 * 5
    mix = 1.0
    for _ in range(20):
        mix = _adapted(mix, 1.0, 0.01, 5)
    assert trainer.context.client.state["fedala"]["mix"]["w"].item() == pytest.approx(mix, abs=1e-14)
    assert trainer.context.client.state["fedala"]["has_adapted"]


def test_the_first_adaptation_ends_when_the_losses_converge() -> None:
    strategy = FedALAUpdateStrategy(eta=0.01, threshold=100.0, num_pre_loss=3)
    trainer = _second_round(strategy, local=1.0, mix=1.0, has_adapted=False)
    trainer.fit(DATA)
    # Three losses are compared once there is a fourth; then comes the epoch of training.
    assert trainer.context.progress.batches == (4 + 1) * 5
    assert len(strategy.anchor["losses"]) == 4


def test_fedala_equals_fedavg_in_the_first_round() -> None:
    one, other = federation(FedALA(), rounds=1).weights, federation(FedAvg(), rounds=1).weights
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_fedala_differs_from_fedavg_after_the_first_round() -> None:
    one, other = federation(FedALA(), rounds=3).weights, federation(FedAvg(), rounds=3).weights
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_mixing_weights_of_one_give_the_received_model() -> None:
    # Nothing is adapted: θ_l is θ_g, so that W does not move.
    trainer = _second_round(FedALAUpdateStrategy(), local=2.0, mix=1.0, has_adapted=True)
    trainer.fit(DATA)
    assert trainer.model.w.item() == pytest.approx(_plainly(2.0), abs=1e-14)


def test_only_the_last_layers_are_adapted() -> None:
    server = federation(FedALA(layer_idx=2))
    assert set(server.states.get(1)["fedala"]["mix"]) == {"head.weight", "head.bias"}
    assert set(server.states.get(1)["fedala"]["local"]) == set(mlp().state_dict())


def test_batch_statistics_and_schedules_are_reset_after_the_adaptation() -> None:
    def trainer(strategy: Any) -> ComposableTrainer:
        torch.manual_seed(0)
        return ComposableTrainer(
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double(),
            optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9),
            lr_scheduler_strategy=StepLRSchedulerStrategy(step_size=1, gamma=0.5),
            model_update_strategy=strategy,
            num_epochs=2,
            batch_size=25,
            verbose=False,
        )

    plain, ala = trainer(None), trainer(FedALAUpdateStrategy())
    # The last local model equals the received one, so training starts with it for any W.
    state = {name: value.clone() for name, value in ala.model.state_dict().items()}
    mix = {name: torch.ones_like(value) for name, value in ala.model.named_parameters()}
    ala.context.client.state["fedala"] = {"local": state, "mix": mix, "has_adapted": torch.tensor(True)}
    for it in (plain, ala):
        it.fit(Blobs().train_data(1))
    assert ala.context.progress.epoch == 3
    assert all(torch.equal(value, plain.model.state_dict()[name]) for name, value in ala.model.state_dict().items())


def test_adaptation_steps_are_not_counted_as_updates() -> None:
    reported: list[int] = []

    class Counting(FedALA):
        def aggregate(self, weights: Any, updates: Any, average: Any) -> Any:
            reported.extend(update.num_updates for update in updates)
            return super().aggregate(weights, updates, average)

    federation(Counting(threshold=100.0, num_pre_loss=2), rounds=3)
    assert sorted(reported) == sorted([2, 4, 8, 10] * 3)


def test_clients_are_evaluated_with_their_adapted_model() -> None:
    server = federation(FedALA(eta=0.5))
    model = mlp()
    for client_id, metrics in server.evaluate_clients().metrics.items():
        kept = server.states.get(client_id)["fedala"]
        own = {
            name: kept["local"][name] + (value - kept["local"][name]) * kept["mix"][name]
            for name, value in server.weights.items()
        }
        model.load_state_dict(own)
        x, y = Blobs().test_data(client_id)
        assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), abs=1e-12)


def test_every_client_has_separate_mixing_weights() -> None:
    server = federation(FedALA(), rounds=2)
    one, other = (server.states.get(client_id)["fedala"]["mix"]["head.weight"] for client_id in (1, 3))
    assert not torch.equal(one, other)
    assert ((one >= 0) & (one <= 1)).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fedala_adapts_in_lower_precision(precision: Any) -> None:
    def adapted(step: Any) -> Any:
        torch.manual_seed(0)
        model = mlp(torch.float32)
        trainer = ComposableTrainer(
            model, model_update_strategy=FedALAUpdateStrategy(eta=0.5), training_step_strategy=step, verbose=False
        )
        trainer.context.client.state["fedala"] = {
            "local": {name: torch.zeros_like(value) for name, value in model.state_dict().items()},
            "mix": {name: torch.ones_like(value) for name, value in model.state_dict().items()},
            "has_adapted": torch.tensor(False),
        }
        trainer.fit(Blobs(dtype=torch.float32).train_data(1))
        return trainer.context.client.state["fedala"]["mix"]

    found = adapted(MixedPrecisionStepStrategy(True, precision=precision))
    expected = adapted(None)
    assert min(float(value.min()) for value in expected.values()) < 0.9
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


def test_a_run_interrupted_in_its_adaptation_resumes_exactly(tmp_path: Any) -> None:
    def trainer(**options: Any) -> ComposableTrainer:
        strategy = FedALAUpdateStrategy(eta=0.01, threshold=100.0, num_pre_loss=2)
        return _second_round(strategy, local=1.0, mix=1.0, has_adapted=False, **options)

    whole = trainer(checkpoint_dir=tmp_path, save_every=0, save_hist=False)
    whole.fit(DATA, checkpoint_period=Batches(4))
    saved = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert len(saved) > 3
    for path in saved:
        resumed = trainer()
        resumed.fit(DATA, resume=path)
        assert torch.equal(resumed.model.w, whole.model.w)
        assert resumed.context.client.state["fedala"]["mix"] == whole.context.client.state["fedala"]["mix"]


def test_an_interrupted_adaptation_resumes_in_a_new_trainer(tmp_path: Any) -> None:
    settings = {"local": 1.0, "mix": 1.0, "has_adapted": True}
    whole = _second_round(FedALAUpdateStrategy(), **settings, checkpoint_dir=tmp_path, save_every=0, save_hist=False)
    whole.fit(DATA, checkpoint_period=Batches(4))
    for path in (path for path in tmp_path.iterdir() if path.is_dir()):
        other = _second_round(FedALAUpdateStrategy(), **settings)
        other.context.client.state.clear()
        other.fit(DATA, resume=path)
        assert torch.equal(other.model.w, whole.model.w)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"eta": 0}, "eta: expected a number above 0, got 0"),
        ({"rand_percent": 101}, "rand_percent: expected a number above 0 and up to 100, got 101"),
        ({"layer_idx": -1}, "layer_idx: expected a number that is at least 0, got -1"),
        ({"num_pre_loss": 0}, "num_pre_loss: expected a number that is at least 1, got 0"),
    ],
)
def test_fedala_rejects_invalid_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FedALA(**given)


def test_more_layers_than_the_model_has_are_rejected() -> None:
    trainer = ComposableTrainer(mlp(), model_update_strategy=FedALAUpdateStrategy(layer_idx=9), verbose=False)
    with pytest.raises(ConfigError, match="layer_idx: expected at most the 4 parameters of the model, got 9"):
        trainer.fit(Blobs().train_data(1))


def test_fedala_conflicts_with_ditto() -> None:
    with pytest.raises(ConfigError, match="both decide the client's own model"):
        CompositeAlgorithm([FedALA(), Ditto()])
