"""LG-FedAvg: two passes over every batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy import Blobs, federation, mlp

from dovetail.callbacks import Callback
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.lg_fedavg import (
    LGFedAvg,
    LGFedAvgStepStrategy,
    LGFedAvgStepStrategyAuto,
    LGFedAvgStepStrategyFromConfig,
)
from dovetail.testing import AlgorithmContract, TrainingStepStrategyContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import configure, reset
from dovetail.trainers.strategies import (
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    SGDOptimizerStrategy,
    TrainingStepStrategy,
)

BODY, HEAD = {"body.weight", "body.bias"}, {"head.weight", "head.bias"}


class TestLGFedAvg(AlgorithmContract):
    vectorizes = True

    def make(self) -> LGFedAvg:
        return LGFedAvg()


@pytest.mark.torture
class TestTheRepresentationStays(AlgorithmContract):
    vectorizes = True

    def make(self) -> LGFedAvg:
        return LGFedAvg(local_layer_names=["0"], train_local_first=False)


class _Watching(Callback):
    """Counts the steps of an optimizer, and notes by which parameters each is made."""

    def __init__(self) -> None:
        self.steps: list[set[str]] = []

    def on_gradients(self, context: Any, optimizer: Any) -> None:
        named = context.model.named_parameters()
        self.steps.append({name for name, parameter in named if parameter.grad is not None})


class _TwoSteps(TrainingStepStrategyContract):
    """The contract of a step, for one that makes two steps with one batch."""

    def test_gradients_are_those_of_a_plain_backward(self) -> None:
        watching = _Watching()
        trainer = self._trainer(self.make())
        trainer.context.callbacks.add(watching)
        self._fit(trainer, 1)
        assert watching.steps == [{"2.weight", "2.bias"}, {"0.weight", "0.bias"}] * 5

    def test_updates_are_real_steps(self) -> None:
        # Every parameter is stepped once with a batch, which is one update.
        assert self._trained(self.make()).context.progress.updates == 2 * 5

    def test_accumulation_is_inherited(self) -> None:
        watching = _Watching()
        trainer = self._trainer(self.make(), accumulation_steps=3)
        trainer.context.callbacks.add(watching)
        self._fit(trainer, 1)
        assert len(watching.steps) == 2 * 2
        assert trainer.context.progress.updates == 2


class TestStrategy(_TwoSteps):
    def make(self) -> LGFedAvgStepStrategy:
        return LGFedAvgStepStrategy(["0"], ["2"])


class TestFromConfig(_TwoSteps):
    def make(self) -> LGFedAvgStepStrategyFromConfig:
        return LGFedAvgStepStrategyFromConfig()


class TestAuto(_TwoSteps):
    def make(self) -> LGFedAvgStepStrategyAuto:
        return LGFedAvgStepStrategyAuto()


def _run(step: TrainingStepStrategy, model: nn.Module | None = None, **options: Any) -> ComposableTrainer:
    torch.manual_seed(0)
    trainer = ComposableTrainer(
        mlp() if model is None else model,
        training_step_strategy=step,
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1, momentum=0.9, weight_decay=0.1),
        **{"num_epochs": 3, "batch_size": 8, "verbose": False, **options},
    )
    x, y = Blobs().train_data(1)
    trainer.fit((x[:24], y[:24]))
    return trainer


@pytest.mark.parametrize("train_local_first", [True, False])
def test_lg_fedavg_alternates_two_optimizers_over_their_layers(train_local_first: bool) -> None:
    """Momentum and decay of one optimizer move nothing while its layers stand still."""
    ours = _run(LGFedAvgStepStrategy(["body"], ["head"], train_local_first=train_local_first), batch_size=24)
    torch.manual_seed(0)
    model = mlp()
    x, y = Blobs().train_data(1)
    parts = [model.head, model.body] if train_local_first else [model.body, model.head]
    own = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for part in parts]
    losses = []
    for _ in range(3):
        for optimizer in own:
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x[:24]), y[:24])
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(ours.model.state_dict(), model.state_dict(), rtol=0, atol=1e-12)
    # The loss of a step is the loss of its second pass.
    assert list(ours.history.losses) == pytest.approx(losses, abs=1e-12)


def test_requires_grad_is_restored_for_every_parameter() -> None:
    model = mlp()
    model.body.bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trainer = _run(LGFedAvgStepStrategyAuto(), model)
    flags = {name: value.requires_grad for name, value in trainer.model.named_parameters()}
    assert flags == {"body.weight": True, "body.bias": False, "head.weight": True, "head.bias": True}
    assert torch.equal(trainer.model.body.bias, before["body.bias"])


def test_a_part_without_trainable_parameters_is_skipped() -> None:
    model = mlp()
    model.body.requires_grad_(False)
    watching = _Watching()
    _run(LGFedAvgStepStrategyAuto(), model, num_epochs=1, callbacks=[watching])
    assert watching.steps == [HEAD] * 3


@pytest.mark.parametrize("train_local_first", [True, False])
@pytest.mark.parametrize(("size", "window"), [(4, 2), (6, 4), (5, 3)])
def test_accumulated_batches_equal_one_large_batch(size: int, window: int, train_local_first: bool) -> None:
    """Also where the last window is shorter, and its last batch: 24 samples in 4 · 6 and in 5 · 5."""

    def run(batch_size: int, accumulation_steps: int) -> dict[str, Tensor]:
        step = LGFedAvgStepStrategyAuto(train_local_first=train_local_first)
        return _run(step, batch_size=batch_size, accumulation_steps=accumulation_steps).model.state_dict()

    torch.testing.assert_close(run(size, window), run(size * window, 1), rtol=0, atol=1e-12)


def test_lg_fedavg_accumulates_inside_an_accumulating_step() -> None:
    outer = GradientAccumulationStepStrategy(3, base_strategy=LGFedAvgStepStrategyAuto())
    ours, theirs = _run(outer, batch_size=4), _run(LGFedAvgStepStrategyAuto(), batch_size=12)
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=1e-12)


def test_a_window_interrupted_by_an_error_is_discarded() -> None:
    class Fails(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            if context.progress.batches == 1 and context.progress.updates == 0:
                raise ValueError("no luck")

    step, failure = LGFedAvgStepStrategyAuto(), Fails()
    trainer = ComposableTrainer(
        mlp(), training_step_strategy=step, batch_size=4, accumulation_steps=3, callbacks=[failure], verbose=False
    )
    x, y = Blobs().train_data(1)
    first = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ValueError, match="no luck"):
        trainer.fit((x[:24], y[:24]))
    trainer.context.callbacks.remove(failure)
    reset(trainer)
    trainer.fit((x[:24], y[:24]))
    fresh = ComposableTrainer(
        mlp(), training_step_strategy=LGFedAvgStepStrategyAuto(), batch_size=4, accumulation_steps=3, verbose=False
    )
    fresh.model.load_state_dict(first)
    fresh.fit((x[:24], y[:24]))
    torch.testing.assert_close(trainer.model.state_dict(), fresh.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lg_fedavg_trains_in_mixed_precision(precision: Any, window: int) -> None:
    step = MixedPrecisionStepStrategy(enabled=True, precision=precision, base_strategy=LGFedAvgStepStrategyAuto())
    options = {"batch_size": 8 // window, "accumulation_steps": window}
    mixed, full = _run(step, **options), _run(LGFedAvgStepStrategyAuto(), **options)
    assert mixed.context.precision is not None
    # A scaler rejects two steps of one optimizer unless the first is marked as done.
    assert (mixed.context.precision.scaler is not None) == (precision == "fp16")
    torch.testing.assert_close(mixed.model.state_dict(), full.model.state_dict(), rtol=0, atol=0.05)
    assert mixed.context.progress.updates == full.context.progress.updates


def test_a_fleet_ends_where_clients_alone_do() -> None:
    alone, fleet = (federation(LGFedAvg(), backend=backend) for backend in ("sequential", "vectorized"))
    torch.testing.assert_close(fleet.weights, alone.weights, rtol=0, atol=1e-10)
    for client_id in range(1, 5):
        ours, theirs = (server.states.get(client_id)["model"] for server in (fleet, alone))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_after_the_last_round_only_local_layers_change() -> None:
    watching = _Watching()
    trainer = ComposableTrainer(
        mlp(), training_step_strategy=LGFedAvgStepStrategy(), num_epochs=1, callbacks=[watching], verbose=False
    )
    trainer.context.config["rounds"], trainer.context.current_round = 1, 2
    trainer.fit(Blobs().train_data(1))
    assert watching.steps == [HEAD]


def test_the_configuration_names_the_layers() -> None:
    watching = _Watching()
    step = LGFedAvgStepStrategyFromConfig()
    trainer = ComposableTrainer(mlp(), training_step_strategy=step, num_epochs=1, callbacks=[watching], verbose=False)
    configure(trainer, {"algorithm": {"local_layer_names": ["body"], "global_layer_names": ["head"]}})
    trainer.fit(Blobs().train_data(1))
    assert watching.steps == [BODY, HEAD]


def test_lg_fedavg_wraps_the_step_of_the_client() -> None:
    def trainer(step: TrainingStepStrategy, batch_size: int) -> ComposableTrainer:
        optimizer = SGDOptimizerStrategy(lr=0.1, momentum=0.5)
        return ComposableTrainer(
            optimizer_strategy=optimizer, training_step_strategy=step, batch_size=batch_size, verbose=False
        )

    small = trainer(GradientAccumulationStepStrategy(2, base_strategy=GradientClippingStepStrategy(0.1)), 4)
    large = trainer(GradientClippingStepStrategy(0.1), 8)
    ours, theirs = (federation(LGFedAvg(), trainer=it) for it in (small, large))
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-12)


def test_a_step_that_cannot_wrap_another_is_rejected() -> None:
    class Own(TrainingStepStrategy):
        def training_step(
            self, model: Any, optimizer: Any, examples: Any, labels: Any, loss_criterion: Any, context: Any
        ) -> Tensor:
            raise AssertionError("never called")

    trainer = ComposableTrainer(training_step_strategy=Own(), verbose=False)
    with pytest.raises(ConfigError, match="computes the whole step and cannot hold LGFedAvgStepStrategy"):
        federation(LGFedAvg(), trainer=trainer)


def test_a_model_without_trainable_parameters_raises_an_error() -> None:
    model = mlp()
    model.head.requires_grad_(False)
    trainer = ComposableTrainer(model, training_step_strategy=LGFedAvgStepStrategy(), verbose=False)
    trainer.context.config["rounds"], trainer.context.current_round = 1, 2
    with pytest.raises(ConfigError, match="cannot train: none of the chosen layers"):
        trainer.fit(Blobs().train_data(1))
