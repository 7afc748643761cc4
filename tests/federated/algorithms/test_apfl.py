"""APFL: a mixture of the model that is sent and of the client's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from toy import Blobs, Point, federation, half_square, mlp

from dovetail.algorithms import SCAFFOLD, Algorithm, CompositeAlgorithm, FedAvg, FedProx
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.algorithms.apfl import APFL, APFLStepStrategy, APFLUpdateStrategy, APFLUpdateStrategyFromConfig
from dovetail.federated.algorithms.ditto import Ditto
from dovetail.testing import AlgorithmContract, ModelUpdateStrategyContract, TrainingStepStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import configure
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    CustomBackwardStepStrategy,
    DefaultTrainingStepStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    SGDOptimizerStrategy,
    ShuffleDataLoaderStrategy,
    StepLRSchedulerStrategy,
    TrainingStepStrategy,
)


class TestAPFL(AlgorithmContract):
    vectorizes = True

    def make(self) -> APFL:
        return APFL(alpha=0.4)


@pytest.mark.torture
class TestOfOutputs(AlgorithmContract):
    vectorizes = True

    def make(self) -> APFL:
        return APFL(mix="outputs")


@pytest.mark.torture
class TestBesideScaffold(AlgorithmContract):
    vectorizes = True

    def make(self) -> Algorithm:
        return CompositeAlgorithm([SCAFFOLD(), APFL()])


class TestUpdateStrategy(ModelUpdateStrategyContract):
    def make(self) -> APFLUpdateStrategy:
        return APFLUpdateStrategy()

    def make_options(self) -> dict[str, Any]:
        return {"training_step_strategy": APFLStepStrategy()}


class TestStep(TrainingStepStrategyContract):
    def make(self) -> APFLStepStrategy:
        return APFLStepStrategy()

    def make_options(self) -> dict[str, Any]:
        return {"model_update_strategy": APFLUpdateStrategy()}


@pytest.mark.parametrize("optimizer", [SGDOptimizerStrategy(lr=0.1, momentum=0.5), AdamOptimizerStrategy(lr=0.01)])
@pytest.mark.parametrize("mix", ["parameters", "outputs"])
def test_a_fleet_ends_where_clients_alone_do(optimizer: Any, mix: Any) -> None:
    def run(backend: str) -> tuple[Any, Any]:
        trainer = ComposableTrainer(
            optimizer_strategy=optimizer,
            data_loader_strategy=ShuffleDataLoaderStrategy(),
            gradient_clip=0.5,
            num_epochs=2,
            batch_size=8,
            verbose=False,
        )
        server = federation(APFL(alpha=0.4, mix=mix), trainer=trainer, backend=backend)
        return server.weights, [server.states.get(client_id) for client_id in range(1, 5)]

    torch.testing.assert_close(run("vectorized"), run("sequential"), rtol=0, atol=1e-10)


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


# f(w) = a (w - b)² / 2, of three batches.
BATCHES = [(1.0, -2.0), (3.0, 1.0), (2.0, 0.5)]


def _point(start: float, own: float, alpha: float, **settings: Any) -> ComposableTrainer:
    """Train one epoch of three batches, by steps of 0.1."""
    options = {name: settings.pop(name) for name in ("accumulation_steps", "gradient_clip") if name in settings}
    trainer = ComposableTrainer(
        Point(start),
        loss_strategy=half_square,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
        training_step_strategy=APFLStepStrategy(),
        model_update_strategy=APFLUpdateStrategy(alpha, model_fn=lambda: Point(own), **settings),
        num_epochs=1,
        batch_size=1,
        verbose=False,
        **options,
    )
    trainer.fit((torch.tensor(BATCHES, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)))
    return trainer


def _kept(trainer: ComposableTrainer) -> tuple[float, float, float]:
    kept = trainer.context.client.state["apfl"]
    return trainer.model.w.item(), kept["v"]["w"].item(), kept["alpha"].item()


@pytest.mark.parametrize("adaptive", [True, False])
def test_apfl_steps_follow_the_paper(adaptive: bool) -> None:
    w, v, alpha = 2.0, 1.0, 0.3
    for number, (a, b) in enumerate(BATCHES):
        slope, own_slope = a * (w - b), a * (alpha * v + (1 - alpha) * w - b)
        moved = alpha - 0.1 * (v - w) * own_slope if adaptive and number == 0 else alpha
        w, v, alpha = w - 0.1 * slope, v - 0.1 * alpha * own_slope, moved
    assert alpha == pytest.approx(0.67 if adaptive else 0.3)
    assert _kept(_point(2.0, 1.0, 0.3, adaptive_alpha=adaptive)) == pytest.approx((w, v, alpha), abs=1e-14)


@pytest.mark.parametrize(("own", "expected"), [(-50.0, 0.0), (50.0, 0.0), (-2.0, 1.0)])
def test_alpha_remains_between_zero_and_one(own: float, expected: float) -> None:
    # From 2, where the optimum is at -2: a v that is there is worth all, and one far beyond it nothing.
    assert _kept(_point(2.0, own, 0.5))[2] == expected


def test_a_window_of_batches_is_one_update_of_both_models_and_of_alpha() -> None:
    w, v, alpha = 2.0, 1.0, 0.3
    mean = sum(a * (w - b) for a, b in BATCHES) / 3
    own_mean = sum(a * (alpha * v + (1 - alpha) * w - b) for a, b in BATCHES) / 3
    expected = w - 0.1 * mean, v - 0.1 * alpha * own_mean, alpha - 0.1 * (v - w) * own_mean
    assert _kept(_point(2.0, 1.0, 0.3, accumulation_steps=3)) == pytest.approx(expected, abs=1e-14)


def test_gradients_of_both_models_are_clipped_separately() -> None:
    w, v, alpha = 2.0, 1.0, 0.3
    for number, (a, b) in enumerate(BATCHES):
        mixed = alpha * v + (1 - alpha) * w
        slopes = [a * (w - b), alpha * a * (mixed - b), (v - w) * a * (mixed - b)]
        clipped = [max(min(slope, 0.5), -0.5) for slope in slopes]
        w, v, alpha = w - 0.1 * clipped[0], v - 0.1 * clipped[1], alpha - 0.1 * clipped[2] * (number == 0)
    assert _kept(_point(2.0, 1.0, 0.3, gradient_clip=0.5)) == pytest.approx((w, v, alpha), abs=1e-6)


@pytest.mark.parametrize("algorithm", [APFL(), APFL(alpha=0.0), APFL(mix="outputs")])
def test_apfl_sends_the_update_of_fedavg(algorithm: APFL) -> None:
    plain, apfl = federation(FedAvg()), federation(algorithm)
    torch.testing.assert_close(apfl.weights, plain.weights, rtol=0, atol=1e-12)
    assert apfl.records[-1].metrics == pytest.approx(plain.records[-1].metrics, abs=1e-12)


def _judged(server: Any, weights: Any) -> dict[int, float]:
    """The loss of every client with its local weights."""
    model, found = mlp(), {}
    for client_id in range(1, 5):
        model.load_state_dict(weights(client_id))
        x, y = Blobs().test_data(client_id)
        found[client_id] = nn.functional.cross_entropy(model(x), y).item()
    return found


def _losses(server: Any) -> dict[int, float]:
    return {client_id: metrics["loss"] for client_id, metrics in server.evaluate_clients().metrics.items()}


def test_with_alpha_zero_clients_use_the_global_model() -> None:
    server = federation(APFL(alpha=0.0, adaptive_alpha=False))
    assert _losses(server) == pytest.approx(_judged(server, lambda _: server.weights), abs=1e-15)


def test_with_alpha_one_clients_use_their_local_model() -> None:
    server = federation(APFL(alpha=1.0, adaptive_alpha=False))
    own = {client_id: server.states.get(client_id)["apfl"]["v"] for client_id in range(1, 5)}
    assert _losses(server) == pytest.approx(_judged(server, own.__getitem__), abs=1e-15)
    assert not _same(own[1], server.weights)


def test_clients_are_evaluated_with_the_mixture() -> None:
    server = federation(APFL(alpha=0.3))

    def mixture(client_id: int) -> dict[str, Tensor]:
        kept = server.states.get(client_id)["apfl"]
        alpha = kept["alpha"]
        return {name: alpha * kept["v"][name] + (1 - alpha) * value for name, value in server.weights.items()}

    assert _losses(server) == pytest.approx(_judged(server, mixture), abs=1e-12)


def _seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return mlp()


def _trained(seed: int, **pieces: Any) -> ComposableTrainer:
    settings = {
        "optimizer_strategy": SGDOptimizerStrategy(lr=0.1, momentum=0.9),
        "data_loader_strategy": ShuffleDataLoaderStrategy(),
        "lr_scheduler_strategy": StepLRSchedulerStrategy(step_size=1, gamma=0.5),
        "num_epochs": 3,
        "batch_size": 8,
        **pieces,
    }
    trainer = ComposableTrainer(_seeded(seed), seed=5, verbose=False, **settings)
    trainer.fit(Blobs().train_data(1))
    return trainer


@pytest.mark.parametrize("optimizer", [SGDOptimizerStrategy(lr=0.1, momentum=0.9), AdamOptimizerStrategy(lr=0.1)])
@pytest.mark.parametrize("mix", ["parameters", "outputs"])
def test_with_alpha_one_the_local_model_trains_independently_bit_for_bit(optimizer: Any, mix: Any) -> None:
    kept = APFLUpdateStrategy(alpha=1.0, adaptive_alpha=False, model_fn=lambda: _seeded(1))
    both = _trained(
        0, optimizer_strategy=optimizer, model_update_strategy=kept, training_step_strategy=APFLStepStrategy(mix)
    )
    assert _same(both.context.client.state["apfl"]["v"], _trained(1, optimizer_strategy=optimizer).model.state_dict())
    assert _same(both.model.state_dict(), _trained(0, optimizer_strategy=optimizer).model.state_dict())


def test_a_linear_model_mixes_outputs_as_it_mixes_parameters() -> None:
    def run(mix: Any) -> Any:
        return federation(APFL(mix=mix), model=lambda: nn.Linear(6, 3).double())

    one, other = run("parameters"), run("outputs")
    for client_id in range(1, 5):
        kept = other.states.get(client_id)["apfl"]
        torch.testing.assert_close(one.states.get(client_id)["apfl"], kept, rtol=0, atol=1e-12)


def test_every_client_has_a_separate_alpha_that_changes_once_models_differ() -> None:
    first, third = (federation(APFL(alpha=0.5), rounds=rounds) for rounds in (1, 3))

    def alphas(server: Any) -> set[float]:
        return {server.states.get(client_id)["apfl"]["alpha"].item() for client_id in range(1, 5)}

    assert alphas(first) == {0.5}
    assert len(alphas(third)) == 4
    assert all(0 < alpha < 1 for alpha in alphas(third))


def test_apfl_does_not_change_scaffold() -> None:
    alone, both = federation(SCAFFOLD()), federation(CompositeAlgorithm([APFL(), SCAFFOLD()]))
    torch.testing.assert_close(both.weights, alone.weights, rtol=0, atol=1e-12)


def test_the_fedprox_term_does_not_apply_to_the_mixture() -> None:
    kept = [
        federation(it, rounds=1).states.get(1)["apfl"]["v"]
        for it in (APFL(alpha=1.0), CompositeAlgorithm([FedProx(mu=1.0), APFL(alpha=1.0)]))
    ]
    torch.testing.assert_close(kept[1], kept[0], rtol=0, atol=1e-12)


def test_the_steps_of_the_local_model_are_not_counted_as_updates() -> None:
    trainer = _trained(0, model_update_strategy=APFLUpdateStrategy(), training_step_strategy=APFLStepStrategy())
    assert trainer.context.progress.updates == 3 * 4


def test_each_of_the_two_models_has_its_batch_statistics() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()

    def trained(**pieces: Any) -> ComposableTrainer:
        torch.manual_seed(0)
        trainer = ComposableTrainer(normed(), num_epochs=2, batch_size=25, verbose=False, **pieces)
        trainer.fit(Blobs().train_data(1))
        return trainer

    plain = trained()
    for mix in ("parameters", "outputs"):
        own = APFLUpdateStrategy(
            alpha=1.0, model_fn=lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        )
        both = trained(model_update_strategy=own, training_step_strategy=APFLStepStrategy(mix))
        assert _same(both.model.state_dict(), plain.model.state_dict())
        kept = both.context.client.state["apfl"]["v"]
        assert kept["1.num_batches_tracked"].item() == 2
        assert not torch.equal(kept["1.running_mean"], plain.model.state_dict()["1.running_mean"])


def _differentiated(model: nn.Module, loss: Tensor, context: Any) -> None:
    context.backward(loss)


@pytest.mark.parametrize(
    "step",
    [
        APFLStepStrategy(base_strategy=GradientClippingStepStrategy(max_norm=1e6)),
        GradientClippingStepStrategy(max_norm=1e6, base_strategy=APFLStepStrategy()),
        APFLStepStrategy(base_strategy=DefaultTrainingStepStrategy(retain_graph=True)),
        APFLStepStrategy(base_strategy=CustomBackwardStepStrategy(_differentiated)),
    ],
)
def test_the_apfl_step_nests_with_other_steps(step: TrainingStepStrategy) -> None:
    nested, plain = (
        _trained(0, model_update_strategy=APFLUpdateStrategy(), training_step_strategy=it)
        for it in (step, APFLStepStrategy())
    )
    assert _same(nested.model.state_dict(), plain.model.state_dict())
    assert _same(nested.context.client.state["apfl"]["v"], plain.context.client.state["apfl"]["v"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_both_models_train_in_lower_precision(precision: Any) -> None:
    def run(step: TrainingStepStrategy, *, windows: int = 1) -> tuple[Any, float]:
        torch.manual_seed(0)
        trainer = ComposableTrainer(
            mlp(torch.float32),
            optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
            model_update_strategy=APFLUpdateStrategy(alpha=0.5, model_fn=lambda: mlp(torch.float32)),
            training_step_strategy=step,
            accumulation_steps=windows,
            num_epochs=3,
            batch_size=4,
            seed=1,
            verbose=False,
        )
        trainer.fit(Blobs(dtype=torch.float32).train_data(1))
        kept = trainer.context.client.state["apfl"]
        return kept["v"], kept["alpha"].item()

    for windows in (1, 3):
        full, alpha = run(APFLStepStrategy(), windows=windows)
        wrapped = MixedPrecisionStepStrategy(True, precision=precision, base_strategy=APFLStepStrategy())
        low, low_alpha = run(wrapped, windows=windows)
        torch.testing.assert_close(low, full, rtol=0.05, atol=0.05)
        assert low_alpha == pytest.approx(alpha, abs=0.02)
        assert alpha != 0.5


def test_the_configuration_sets_alpha() -> None:
    trainer = ComposableTrainer(
        mlp(),
        training_step_strategy=APFLStepStrategy(),
        model_update_strategy=APFLUpdateStrategyFromConfig(),
        num_epochs=1,
        verbose=False,
    )
    configure(trainer, {"algorithm": {"alpha": 0.75, "adaptive_alpha": False}})
    trainer.fit(Blobs().train_data(1))
    assert trainer.context.client.state["apfl"]["alpha"].item() == 0.75


def test_an_apfl_step_without_a_stored_local_model_is_rejected() -> None:
    trainer = ComposableTrainer(mlp(), training_step_strategy=APFLStepStrategy(), verbose=False)
    with pytest.raises(ConfigError, match="give the trainer an APFLUpdateStrategy, too, which keeps v and α"):
        trainer.fit(Blobs().train_data(1))


def test_an_optimizer_with_a_closure_is_rejected() -> None:
    trainer = ComposableTrainer(
        mlp(),
        optimizer_strategy=lambda parameters: LBFGS(parameters),
        training_step_strategy=APFLStepStrategy(),
        model_update_strategy=APFLUpdateStrategy(),
        verbose=False,
    )
    with pytest.raises(ConfigError, match="LBFGS"):
        trainer.fit(Blobs().train_data(1))


class _Whole(TrainingStepStrategy):
    def training_step(self, model: Any, optimizer: Any, examples: Any, labels: Any, *rest: Any) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("steps", [APFLStepStrategy(base_strategy=_Whole()), [APFLStepStrategy(), _Whole()]])
def test_a_step_that_computes_everything_itself_cannot_be_nested(steps: Any) -> None:
    with pytest.raises(ConfigError, match="APFL needs the loss of two models"):
        ComposableTrainer(mlp(), training_step_strategy=steps, verbose=False)


def test_two_algorithms_with_local_models_are_rejected() -> None:
    with pytest.raises(ConfigError, match="APFL and Ditto both decide the client's own model"):
        CompositeAlgorithm([APFL(), Ditto()])


def test_apfl_rejects_invalid_arguments() -> None:
    with pytest.raises(ConfigError, match="alpha: expected a number from 0 to 1, got 2"):
        APFL(alpha=2)
    with pytest.raises(UnknownNameError, match="did you mean 'outputs'"):
        APFL(mix="output")  # type: ignore[arg-type]  # the mistake that is tested
