"""MOON: the contrast to other models, and which ones they are."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, federation, mlp

from dovetail.algorithms import CompositeAlgorithm, FedAvg, FedProx
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.fedsam import FedSAM
from dovetail.federated.algorithms.moon import MOON, MOONStepStrategy
from dovetail.testing import AlgorithmContract, TrainingStepStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import reset
from dovetail.trainers.strategies import (
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    SGDOptimizerStrategy,
    ShuffleDataLoaderStrategy,
    TrainingStepStrategy,
)
from dovetail.units import Batches

# Workers cannot import what pytest has loaded from a path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Projecting(nn.Module):
    """A body, a projection and a head; on demand, layers that differ between training and evaluation."""

    def __init__(self, inputs: int = 6, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 5), *layers, nn.Tanh())
        self.projection = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward_with_projection(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x)
        projection = self.projection(features)
        return features, projection, self.head(projection)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_with_projection(x)[2]


def _model(*layers: nn.Module) -> Projecting:
    torch.manual_seed(0)
    return Projecting(6, *layers).double()


class TestMOON(AlgorithmContract):
    def make(self) -> MOON:
        return MOON(mu=2.0, history_size=2)

    def make_model(self) -> nn.Module:
        return Projecting().double()


class TestStep(TrainingStepStrategyContract):
    """The state after the first run of a client."""

    def make(self) -> MOONStepStrategy:
        return MOONStepStrategy()

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return Projecting(inputs=4)


def _trainer(step: TrainingStepStrategy | None, model: nn.Module | None = None, **options: Any) -> ComposableTrainer:
    settings = {"num_epochs": 2, "batch_size": 8, "optimizer_strategy": SGDOptimizerStrategy(lr=0.1, momentum=0.9)}
    return ComposableTrainer(model or _model(), training_step_strategy=step, verbose=False, **{**settings, **options})


def _rounds(trainer: ComposableTrainer, number: int) -> dict[str, Tensor]:
    x, y = Blobs().train_data(1)
    for _ in range(number):
        reset(trainer)
        trainer.fit((x[:24], y[:24]))
    state: dict[str, Tensor] = trainer.model.state_dict()
    return state


def _with(state: dict[str, Tensor], *layers: nn.Module) -> Projecting:
    model = _model(*layers)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("history_size", [1, 2])
def test_the_contrastive_loss_follows_the_paper(history_size: int) -> None:
    strategy = MOONStepStrategy(mu=2.0, temperature=0.3, history_size=history_size)
    trainer = _trainer(strategy)
    ends = [{name: value.clone() for name, value in _rounds(trainer, 1).items()} for _ in range(3)]
    # The fourth run starts from other weights, as with a new global model.
    reset(trainer)
    with torch.no_grad():
        for value in trainer.model.parameters():
            value.mul_(0.9)
    begin = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    x, y = Blobs().train_data(1)
    trainer.fit((x[:8], y[:8]), max_length=Batches(1))
    losses = list(trainer.history.losses)
    model = _with(begin)
    z, out = model.forward_with_projection(x[:8])[1:]
    others = [_with(each).forward_with_projection(x[:8])[1] for each in (begin, *ends[-history_size:])]
    similar = torch.stack([nn.functional.cosine_similarity(z, other) for other in others], dim=1)
    probability = (similar / 0.3).softmax(dim=1)[:, 0]
    expected = nn.functional.cross_entropy(out, y[:8]) - 2.0 * probability.log().mean()
    assert losses == [pytest.approx(expected.item(), abs=1e-12)]


def test_a_client_keeps_its_last_models() -> None:
    trainer = _trainer(MOONStepStrategy(history_size=2))
    ends = [{name: value.clone() for name, value in _rounds(trainer, 1).items()} for _ in range(3)]
    kept = trainer.context.client.state["moon"]
    torch.testing.assert_close(kept, ends[1:], rtol=0, atol=0)


def test_every_client_keeps_separate_models() -> None:
    server = federation(MOON(mu=2.0), model=_model)
    kept = [server.states.get(client_id)["moon"] for client_id in range(1, 5)]
    assert [len(each) for each in kept] == [1, 1, 1, 1]
    assert len({float(each[0]["head.bias"][0]) for each in kept}) == 4


def test_the_first_round_uses_only_the_task_loss() -> None:
    ours, plain = (federation(it, model=_model, rounds=1) for it in (MOON(), FedAvg()))
    torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=0)


def test_moon_with_mu_0_is_fedavg() -> None:
    ours, plain = (federation(it, model=_model) for it in (MOON(mu=0.0), FedAvg()))
    torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=0)


def test_moon_is_near_fedavg_only_near_mu_0() -> None:
    near, far, plain = (federation(it, model=_model).weights for it in (MOON(mu=1e-9), MOON(mu=5.0), FedAvg()))
    torch.testing.assert_close(near, plain, rtol=0, atol=1e-7)
    assert (far["head.bias"] - plain["head.bias"]).abs().max() > 1e-4


def test_a_resumed_client_run_is_counted_once() -> None:
    trainer = _trainer(MOONStepStrategy(history_size=3))
    for epochs in (1, 2):
        trainer.options.num_epochs = epochs
        trainer.fit(Blobs().train_data(1))
    (kept,) = trainer.context.client.state["moon"]
    torch.testing.assert_close(kept, trainer.model.state_dict(), rtol=0, atol=0)


def test_the_personalization_round_does_not_change_the_kept_models() -> None:
    server = federation(MOON(), model=_model)
    before = server.states.get(1)["moon"]
    server.personalize(epochs=1)
    torch.testing.assert_close(server.states.get(1)["moon"], before, rtol=0, atol=0)


def test_the_other_models_run_in_evaluation_mode_without_side_effects() -> None:
    """With BatchNorm and dropout: statistics and random numbers equal training without the term."""

    def run(mu: float) -> tuple[list[float], dict[str, Tensor]]:
        model = _model(nn.BatchNorm1d(5), nn.Dropout(0.3))
        torch.manual_seed(1)
        trainer = _trainer(MOONStepStrategy(mu=mu), model, optimizer_strategy=SGDOptimizerStrategy(lr=0.0))
        _rounds(trainer, 2)
        return list(trainer.history.losses), dict(model.named_buffers())

    (with_term, buffers), (without, expected) = run(1.0), run(0.0)
    torch.testing.assert_close(buffers, expected, rtol=0, atol=0)
    # Weights never move, but statistics do: the two other models differ in these, so that the term is not log 2.
    terms = [one - other for one, other in zip(with_term, without, strict=True)]
    assert all(0 < term < 2 for term in terms)


def test_a_second_run_resumes_bit_for_bit(tmp_path: Any) -> None:
    def trainer(**options: Any) -> ComposableTrainer:
        torch.manual_seed(0)
        return _trainer(MOONStepStrategy(mu=2.0), data_loader_strategy=ShuffleDataLoaderStrategy(), seed=1, **options)

    data = Blobs().train_data(1)
    whole = trainer(checkpoint_dir=str(tmp_path), save_every=0, save_hist=False)
    whole.fit(data)
    reset(whole)
    whole.fit(data, checkpoint_period=Batches(3))
    paths = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(paths) > 1
    for path in paths:
        resumed = trainer()
        resumed.fit(data, resume=path)
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(resumed.context.client.state, whole.context.client.state, rtol=0, atol=0)


def _run(step: TrainingStepStrategy, **options: Any) -> dict[str, Tensor]:
    return _rounds(_trainer(step, **options), 3)


def test_accumulated_batches_equal_one_large_batch() -> None:
    clipping = GradientClippingStepStrategy(max_norm=0.3)
    inside = MOONStepStrategy(base_strategy=GradientAccumulationStepStrategy(3, base_strategy=clipping))
    around = GradientAccumulationStepStrategy(3, base_strategy=MOONStepStrategy(base_strategy=clipping))
    large = _run(MOONStepStrategy(base_strategy=clipping), batch_size=12)
    for step in (inside, around):
        torch.testing.assert_close(_run(step, batch_size=4), large, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_inside", [False, True])
def test_moon_trains_in_mixed_precision(is_inside: bool) -> None:
    inside = None if is_inside else MOONStepStrategy(mu=0.5)
    mixed = MixedPrecisionStepStrategy(enabled=True, precision="bf16", base_strategy=inside)
    step = MOONStepStrategy(mu=0.5, base_strategy=mixed) if is_inside else mixed
    torch.testing.assert_close(_run(step), _run(MOONStepStrategy(mu=0.5)), rtol=0, atol=0.2)


def test_moon_and_fedprox_combine() -> None:
    both = federation(CompositeAlgorithm([FedProx(mu=0.0), MOON()]), model=_model)
    torch.testing.assert_close(both.weights, federation(MOON(), model=_model).weights, rtol=0, atol=1e-12)


def test_a_model_without_a_projection_is_rejected() -> None:
    message = "MOON: Sequential has no forward_with_projection"
    with pytest.raises(ConfigError, match=message):
        MOON().prepare(mlp(), num_clients=2)
    with pytest.raises(ConfigError, match=message):
        _rounds(_trainer(MOONStepStrategy(), mlp()), 1)


def test_moon_is_rejected_with_another_algorithm_that_computes_batches() -> None:
    with pytest.raises(ConfigError, match="MOON and FedSAM both decide how a batch is computed"):
        CompositeAlgorithm([MOON(), FedSAM()])


@pytest.mark.parametrize("given", [{"mu": -1.0}, {"temperature": 0.0}, {"history_size": 0}])
def test_moon_rejects_invalid_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        MOON(**given)
