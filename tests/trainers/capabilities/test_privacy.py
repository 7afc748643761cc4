"""Differential privacy: known answers, and equality with training without it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import assert_same_weights, make_problem
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dovetail import Batches, Epochs
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError, MissingExtraError, UnknownNameError
from dovetail.trainers import Trainer
from dovetail.trainers.capabilities.auto_batch import AutoBatch
from dovetail.trainers.capabilities.compiled import Compiled
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.capabilities.privacy import DifferentialPrivacy
from dovetail.trainers.capabilities.sharded import ShardedDataParallel
from dovetail.trainers.decorators import AMPTrainer, DDPTrainer, FSDPTrainer, TrainerDecorator, build_trainer

pytest.importorskip("opacus", reason="the extra 'privacy' is not installed")

from opacus.accountants import create_accountant

PROBLEM = make_problem()
DATA = (PROBLEM.x, PROBLEM.y)
EXACT = (PROBLEM.x.double(), PROBLEM.y)


class PrivateTrainer(DifferentialPrivacy, TrainerDecorator):
    pass


def plain(model: nn.Module | None = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "optim_function": "SGD",
        "learning_rate": 0.5,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "num_epochs": 2,
        "batch_size": 8,
        "seed": 1,
        "verbose": False,
    }
    return Trainer(PROBLEM.model() if model is None else model, "cpu", **{**defaults, **options})


def private(model: nn.Module | None = None, privacy: dict[str, Any] | None = None, **options: Any) -> Any:
    return PrivateTrainer(plain(model, **options), **{"noise_seed": 5, **(privacy or {})})


def exact_model() -> nn.Module:
    return PROBLEM.model(dtype=torch.float64)


def assert_close(one: nn.Module, other: nn.Module, within: float = 1e-12) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0.0, atol=within, msg=name)


NO_NOISE = {"noise_multiplier": 0.0}
NO_PRIVACY = {**NO_NOISE, "max_grad_norm": 1e9}
GIVEN = {"sample_rate": 0.1, "delta": 0.01}


def clipped_step(model: nn.Module, x: Tensor, y: Tensor, limit: float, rate: float, size: float) -> None:
    """One step of DP-SGD without noise, sample by sample."""
    parameters = list(model.parameters())
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for number in range(len(x)):
        gradients = torch.autograd.grad(cross_entropy(model(x[number, None]), y[number, None]), parameters)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * min(1.0, limit / float(norm))
    with torch.no_grad():
        for parameter, total in zip(parameters, totals, strict=True):
            parameter -= rate * total / size


# ---------------------------------------------------------------------- what is computed


def test_dp_without_noise_and_with_a_huge_norm_equals_the_plain_trainer() -> None:
    one, other = private(exact_model(), NO_PRIVACY), plain(exact_model())
    one.fit(EXACT)
    other.fit(EXACT)
    assert_close(one.model, other.model)


def test_every_sample_is_clipped_to_the_norm() -> None:
    trainer = private(exact_model(), {**NO_NOISE, **GIVEN, "max_grad_norm": 0.3}, momentum=0.0, num_epochs=1)
    by_hand = exact_model()
    batches = [(x.double(), y) for x, y in PROBLEM.batches]
    trainer.fit(batches)
    for x, y in batches:
        clipped_step(by_hand, x, y, limit=0.3, rate=0.5, size=len(x))
    # Opacus adds 1e-6 to each norm before it divides by it.
    assert_close(trainer.model, by_hand, within=1e-4)
    assert any(
        (one - other).abs().max() > 0.01
        for one, other in zip(trainer.model.parameters(), exact_model().parameters(), strict=True)
    )


def test_the_clipping_norm_is_computed_over_all_parameters_together() -> None:
    trainer = private(exact_model(), {**NO_NOISE, **GIVEN, "max_grad_norm": 0.01}, momentum=0.0, num_epochs=1)
    before = torch.cat([value.flatten() for value in trainer.model.state_dict().values()])
    trainer.fit([(PROBLEM.x[:1].double(), PROBLEM.y[:1])])
    moved = torch.cat([value.flatten() for value in trainer.model.state_dict().values()]) - before
    assert moved.norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_the_noise_has_the_documented_standard_deviation() -> None:
    def weights_after_one_update(noise: float) -> Tensor:
        model = nn.Linear(2000, 10, bias=False)
        nn.init.zeros_(model.weight)
        data = [(torch.ones(4, 2000), torch.zeros(4, dtype=torch.long))]
        settings = {**GIVEN, "noise_multiplier": noise, "max_grad_norm": 2.0, "noise_seed": 0}
        private(model, settings, momentum=0.0, learning_rate=1.0, num_epochs=1).fit(data)
        return model.weight.detach()

    noise = weights_after_one_update(3.0) - weights_after_one_update(0.0)
    assert noise.std().item() == pytest.approx(3.0 * 2.0 / 4, rel=0.02)
    assert abs(noise.mean().item()) < 0.05


def test_accumulated_private_batches_equal_one_large_batch() -> None:
    settings = {**NO_NOISE, **GIVEN, "max_grad_norm": 0.3}
    x, y = EXACT
    small = list(zip(x.split(8), y.split(8), strict=True))
    # The last window has two batches in place of five.
    large = list(zip(x.split(40), y.split(40), strict=True))
    one = private(exact_model(), settings, accumulation_steps=5)
    other = private(exact_model(), settings)
    one.fit(small)
    other.fit(large)
    assert_close(one.model, other.model)


def test_noise_is_added_once_per_update_for_any_number_of_batches() -> None:
    one = private(exact_model(), GIVEN, accumulation_steps=4)
    other = private(exact_model(), GIVEN)
    x, y = EXACT
    one.fit(list(zip(x.split(8), y.split(8), strict=True)))
    other.fit(list(zip(x.split(32), y.split(32), strict=True)))
    assert_close(one.model, other.model)


def test_parameters_of_a_module_unknown_to_opacus_are_clipped_too() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((6,), 1.5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def model() -> nn.Module:
        return nn.Sequential(Scale(), exact_model())

    one, other = private(model(), NO_PRIVACY), plain(model())
    one.fit(EXACT)
    other.fit(EXACT)
    assert_close(one.model, other.model)


def test_a_manual_private_step_equals_the_automatic_one() -> None:
    def by_hand(trainer: Any, batch: Any) -> dict[str, Tensor]:
        loss = cross_entropy(trainer.model(batch[0]), batch[1])
        trainer.context.backward(loss)
        trainer.context.step()
        return {"loss": loss.detach()}

    one, other = private(train_step=by_hand), private()
    one.fit(DATA)
    other.fit(DATA)
    assert_same_weights(one.model, other.model)


@pytest.mark.parametrize("poisson", [False, True])
def test_private_decorator_and_add_on_are_bit_equal(poisson: bool) -> None:
    settings = {"noise_seed": 5, "poisson_sampling": poisson}
    options = {
        "optim_function": "SGD",
        "learning_rate": 0.5,
        "batch_size": 8,
        "num_epochs": 2,
        "seed": 1,
        "verbose": False,
    }
    one = PrivateTrainer(Trainer(PROBLEM.model(), "cpu", **options), **settings)
    other = Trainer.add_on(DifferentialPrivacy)(PROBLEM.model(), "cpu", **settings, **options)
    one.fit(DATA)
    other.fit(DATA)
    assert_same_weights(one.model, other.model)


def test_bfloat16_works_inside_and_outside_the_private_layer() -> None:
    inside = PrivateTrainer(AMPTrainer(plain(), precision="bf16"), noise_seed=5)
    outside = AMPTrainer(PrivateTrainer(plain(), noise_seed=5), precision="bf16")
    inside.fit(DATA)
    outside.fit(DATA)
    assert_same_weights(inside.model, outside.model)
    full = private()
    full.fit(DATA)
    assert_close(inside.model, full.model, within=0.2)


def test_data_parallel_in_one_process_does_not_change_private_training() -> None:
    whole, inside, outside = private(), DDPTrainer(private()), PrivateTrainer(DDPTrainer(plain()), noise_seed=5)
    whole.fit(DATA)
    for trainer in (inside, outside):
        trainer.fit(DATA)
        assert_same_weights(trainer.model, whole.model)
        assert trainer.epsilon == whole.epsilon


def test_the_private_layer_is_built_by_name_with_the_settings_of_pymarlin() -> None:
    settings = {"noise_seed": 5, "per_sample_max_grad_norm": 0.5, "sample_rate": 0.0}
    options: dict[str, Any] = {"batch_size": 8, "num_epochs": 1, "verbose": False}
    for name, outer in (("sp-dp", ["PrivateTrainer"]), ("ddp-dp", ["PrivateTrainer", "DDPTrainer"])):
        trainer: Any = build_trainer(name, PROBLEM.model(), "cpu", **settings, **options)
        trainer.fit(DATA)
        layers = [type(trainer).__name__, type(trainer.trainer).__name__]
        assert layers[: len(outer)] == outer
        assert (trainer.max_grad_norm, trainer.sample_rate) == (0.5, None)
        assert trainer.state_dict()["differential_privacy"]["spent"] == [[1.0, 8 / 96, 12]]


def test_two_names_of_one_setting_are_rejected() -> None:
    with pytest.raises(ConfigError, match="max_grad_norm and per_sample_max_grad_norm: give one of them"):
        build_trainer("sp-dp", PROBLEM.model(), "cpu", max_grad_norm=1.0, per_sample_max_grad_norm=1.0)


# ---------------------------------------------------------------------- what it costs


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_equals_the_value_of_the_opacus_accountant(accountant: str) -> None:
    trainer = private(privacy={"noise_multiplier": 1.3, "accountant": accountant})
    history = trainer.fit(DATA)
    expected = create_accountant(accountant)
    for _ in range(2 * 12):
        expected.step(noise_multiplier=1.3, sample_rate=8 / 96)
    assert trainer.epsilon == expected.get_epsilon(delta=1 / 96) > 0.0
    assert history.get_latest_metric("train_epsilon") == trainer.epsilon


def test_an_update_of_several_batches_multiplies_the_sampling_rate() -> None:
    trainer = private(accumulation_steps=4)
    trainer.fit(DATA)
    expected = create_accountant("rdp")
    for _ in range(2 * 3):
        expected.step(noise_multiplier=1.0, sample_rate=32 / 96)
    assert trainer.epsilon == expected.get_epsilon(delta=1 / 96)


def test_callbacks_receive_a_growing_epsilon() -> None:
    received = []

    class Watch(Callback):
        def on_epoch_end(self, context: Any, metrics: Any) -> None:
            received.append(metrics["train_epsilon"])

    private(callbacks=[Watch()], num_epochs=3).fit(DATA)
    assert len(received) == 3
    assert 0.0 < received[0] < received[1] < received[2]


def test_epsilon_without_noise_is_infinite() -> None:
    trainer = private(privacy=NO_NOISE)
    assert trainer.epsilon == 0.0
    trainer.fit(DATA, max_length=Epochs(1))
    assert trainer.epsilon == math.inf


def test_the_noise_multiplier_is_computed_for_a_target_epsilon() -> None:
    trainer = private(privacy={**GIVEN, "target_epsilon": 1.0}, accumulation_steps=5)
    trainer.fit(DATA, max_length=Batches(30))
    # Two epochs of three updates each, and six batches of a third one: two more.
    assert trainer.context.progress.updates == 8
    assert 0.98 < trainer.epsilon <= 1.0
    # A resumed run continues with it at any length.
    resumed = private(privacy={**GIVEN, "target_epsilon": 1.0}, accumulation_steps=5)
    resumed.load_state_dict(trainer.state_dict())
    resumed.fit(DATA, max_length=Batches(31))
    assert resumed.noise_multiplier == trainer.noise_multiplier
    assert resumed.epsilon > trainer.epsilon


def test_two_runs_without_a_seed_have_different_noise() -> None:
    one, other = PrivateTrainer(plain()), PrivateTrainer(plain())
    one.fit(DATA, max_length=Batches(1))
    other.fit(DATA, max_length=Batches(1))
    assert not torch.equal(one.model[0].weight, other.model[0].weight)


# ---------------------------------------------------------------------- Poisson sampling


class Batchwise(Callback):
    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_step_start(self, context: Any, batch: Any) -> None:
        self.batches.append(batch)


def test_poisson_batches_are_divided_by_the_expected_size() -> None:
    seen = Batchwise()
    settings = {**NO_NOISE, "max_grad_norm": 0.3, "poisson_sampling": True}
    trainer = private(exact_model(), settings, momentum=0.0, callbacks=[seen], num_epochs=1)
    trainer.fit(EXACT)
    by_hand = exact_model()
    for x, y in seen.batches:
        clipped_step(by_hand, x, y, limit=0.3, rate=0.5, size=8)
    assert len(seen.batches) == 12
    assert len({len(x) for x, _ in seen.batches}) > 3
    assert_close(trainer.model, by_hand, within=1e-4)


def test_every_epoch_draws_new_poisson_samples() -> None:
    seen = Batchwise()
    private(privacy={"poisson_sampling": True}, callbacks=[seen]).fit(DATA)
    first, second = seen.batches[:12], seen.batches[12:]
    assert [len(x) for x, _ in first] != [len(x) for x, _ in second]


def test_an_update_without_samples_applies_only_noise() -> None:
    seen = Batchwise()
    settings = {"poisson_sampling": True, "noise_seed": 0}
    trainer = private(privacy=settings, batch_size=1, callbacks=[seen], num_epochs=3, drop_last=False)
    trainer.fit((PROBLEM.x[:4], PROBLEM.y[:4]))
    assert any(isinstance(batch, Tensor) for batch in seen.batches)
    assert trainer.context.progress.updates == 12
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 4}], ids=["each batch", "accumulated"])
def test_a_resumed_private_run_equals_an_uninterrupted_one(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = private(**options)
    whole.fit(DATA)
    begun = private(**options)
    begun.fit(DATA, max_length=Batches(8))
    begun.save_checkpoint(tmp_path / "begun")
    # No seed: the noise is restored only from the checkpoint.
    resumed = PrivateTrainer(plain(**options))
    resumed.fit(DATA, resume=tmp_path / "begun")
    assert_same_weights(resumed.model, whole.model)
    assert resumed.epsilon == whole.epsilon


def test_resumed_poisson_sampling_draws_the_rest_of_the_epoch(tmp_path: Path) -> None:
    settings = {"poisson_sampling": True}
    whole = private(privacy=settings)
    whole.fit(DATA)
    begun = private(privacy=settings, callbacks=[_StopAt(7)])
    begun.fit(DATA)
    begun.save_checkpoint(tmp_path / "begun")
    resumed = PrivateTrainer(plain(), **settings)
    resumed.fit(DATA, resume=tmp_path / "begun")
    assert_same_weights(resumed.model, whole.model)
    assert resumed.epsilon == whole.epsilon


class _StopAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_step_end(self, context: Any, output: Any) -> None:
        if context.progress.batches == self.batch:
            context.stop("here")


def test_checkpoints_can_be_exchanged_with_a_trainer_without_privacy(tmp_path: Path) -> None:
    one = private()
    one.fit(DATA, max_length=Epochs(1))
    one.save_checkpoint(tmp_path / "private")
    other = plain()
    other.load_checkpoint(tmp_path / "private")
    assert_same_weights(one.model, other.model)
    other.save_checkpoint(tmp_path / "plain")
    again = private()
    with pytest.warns(UserWarning, match="written without differential privacy"):
        again.load_checkpoint(tmp_path / "plain")
    assert again.epsilon == 0.0


def test_a_private_run_removes_its_hooks_from_model_and_optimizer() -> None:
    trainer = private()
    trainer.fit(DATA)
    assert all(vars(parameter) == {} for parameter in trainer.model.parameters())
    assert all(not module._forward_hooks and not module._backward_hooks for module in trainer.model.modules())
    assert "activations" not in vars(trainer.model[0])
    assert not trainer.optimizer._optimizer_step_pre_hooks


def test_an_error_in_a_private_run_leaves_no_counted_samples() -> None:
    def failing(trainer: Any, batch: Any) -> dict[str, Tensor]:
        loss = cross_entropy(trainer.model(batch[0]), batch[1])
        if trainer.context.progress.batches == 3 and not failed:
            failed.append(True)
            raise RuntimeError("once")
        return {"loss": loss}

    failed: list[bool] = []
    trainer, whole = private(train_step=failing), private()
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit(DATA)
    trainer.fit(DATA)
    whole.fit(DATA)
    assert_same_weights(trainer.model, whole.model)
    assert trainer.epsilon == whole.epsilon


def test_evaluation_works_without_privacy_checks() -> None:
    trainer = private()
    trainer.evaluate(DATA)
    assert trainer.predict(PROBLEM.x).shape == (96, 3)
    assert trainer.epsilon == 0.0


# ---------------------------------------------------------------------- what is refused


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_batch_norm_is_rejected_by_name_with_an_alternative() -> None:
    advice = r"'1' \(BatchNorm1d\): use GroupNorm, or train the model .*fix\(model\) returns"
    with pytest.raises(ConfigError, match=advice):
        private(batch_norm()).fit(DATA)


def test_batch_norm_without_parameters_is_rejected_too() -> None:
    with pytest.raises(ConfigError, match="BatchNorm1d"):
        private(nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3))).fit(DATA)


def test_frozen_batch_norm_is_accepted() -> None:
    model = batch_norm()
    model[1].eval().requires_grad_(False)
    trainer = private(model)
    trainer.fit(DATA)
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert trainer.epsilon > 0.0


def test_an_lstm_is_rejected_with_the_name_of_its_private_replacement() -> None:
    with pytest.raises(ConfigError, match="cannot train LSTM: use DPLSTM"):
        private(nn.LSTM(6, 3)).fit(DATA)


def test_a_module_with_buffers_is_rejected() -> None:
    layer = nn.Linear(6, 3)
    layer.register_buffer("seen", torch.zeros(1))
    with pytest.raises(ConfigError, match=r"'0' \(Linear\) with its buffers"):
        private(nn.Sequential(layer)).fit(DATA)


def test_gradient_clip_is_rejected() -> None:
    with pytest.raises(ConfigError, match="gradient_clip and differential privacy: set only max_grad_norm"):
        private(gradient_clip=1.0).fit(DATA)


def test_float16_is_rejected() -> None:
    with pytest.raises(ConfigError, match="use bf16 in place of fp16"):
        AMPTrainer(private(), precision="fp16").fit(DATA)


def test_several_optimizers_are_rejected() -> None:
    model = PROBLEM.model()
    optimizers = [torch.optim.SGD(model[number].parameters(), lr=0.5, momentum=0.9) for number in (0, 3)]
    with pytest.raises(ConfigError, match="needs one optimizer, got 2"):
        private(model, optim_function=optimizers).fit(DATA)


def test_a_parameter_that_does_not_belong_to_the_model_is_rejected() -> None:
    model, stray = PROBLEM.model(), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), stray], lr=0.5, momentum=0.9)
    with pytest.raises(ConfigError, match="parameters that are not the model's"):
        private(model, optim_function=optimizer).fit(DATA)


def test_an_optimizer_with_a_closure_is_rejected() -> None:
    with pytest.raises(ConfigError, match="one loss per batch"):
        private(optim_function="LBFGS").fit(DATA)


def test_accumulation_of_poisson_batches_is_rejected() -> None:
    with pytest.raises(ConfigError, match="poisson_sampling and accumulation_steps"):
        private(privacy={"poisson_sampling": True}, accumulation_steps=2).fit(DATA)


@pytest.mark.parametrize("data", [PROBLEM.batches, DATA], ids=["batches", "not shuffled"])
def test_data_with_unknown_sampling_is_rejected(data: Any) -> None:
    with pytest.raises(ConfigError, match="needs to know how the training data is sampled"):
        private(shuffle=False).fit(data)


@pytest.mark.parametrize("other", [Compiled, AutoBatch, ShardedDataParallel])
def test_layers_that_would_break_the_guarantee_are_rejected(other: type[Capability]) -> None:
    with pytest.raises(ConfigError, match=f"PrivateTrainer and {other.__name__} cannot be combined: "):
        PrivateTrainer(Trainer.add_on(other)(PROBLEM.model(), "cpu"))
    with pytest.raises(ConfigError, match=f"{other.__name__} and DifferentialPrivacy cannot be combined: "):
        Trainer.add_on(DifferentialPrivacy, other)(PROBLEM.model(), "cpu")


def test_sharded_parameters_are_rejected_at_any_depth_of_layers() -> None:
    with pytest.raises(ConfigError, match="PrivateTrainer and FSDPTrainer cannot be combined: "):
        PrivateTrainer(AMPTrainer(FSDPTrainer(plain(PROBLEM.model()))))


@pytest.mark.parametrize(
    ("criterion", "sentence"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "the mean over samples"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "class weights"),
    ],
    ids=["sum", "class weights"],
)
def test_a_criterion_that_is_not_a_mean_over_samples_is_rejected(criterion: nn.Module, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        private(criterion=criterion).fit(DATA)


def counts_items(trainer: Any, batch: Any) -> dict[str, Any]:
    return {"loss": cross_entropy(trainer.model(batch[0]), batch[1]), "num_items": torch.tensor(3)}


def two_losses(trainer: Any, batch: Any) -> dict[str, Any]:
    for _ in range(2):
        trainer.context.backward(cross_entropy(trainer.model(batch[0]), batch[1]))
        trainer.context.step()
    return {"loss": torch.zeros(())}


def past_the_context(trainer: Any, batch: Any) -> dict[str, Any]:
    cross_entropy(trainer.model(batch[0]), batch[1]).backward()
    trainer.context.step()
    return {"loss": torch.zeros(())}


def past_everything(trainer: Any, batch: Any) -> dict[str, Any]:
    cross_entropy(trainer.model(batch[0]), batch[1]).backward()
    trainer.optimizer.step()
    return {"loss": torch.zeros(())}


def twice_at_once(trainer: Any, batch: Any) -> dict[str, Any]:
    cross_entropy(trainer.model(batch[0]), batch[1]).backward()
    return {"loss": cross_entropy(trainer.model(batch[0]), batch[1])}


def with_a_penalty(trainer: Any, batch: Any) -> dict[str, Any]:
    penalty = 0.1 * sum(parameter.square().sum() for parameter in trainer.model.parameters())
    return {"loss": cross_entropy(trainer.model(batch[0]), batch[1]) + penalty}


def for_nothing(trainer: Any, batch: Any) -> dict[str, Any]:
    loss = cross_entropy(trainer.model(batch[0]), batch[1])
    trainer.model(batch[0])
    return {"loss": loss}


def of_half_the_batch(trainer: Any, batch: Any) -> dict[str, Any]:
    return {"loss": cross_entropy(trainer.model(batch[0][:4]), batch[1][:4])}


def of_one_layer(trainer: Any, batch: Any) -> dict[str, Any]:
    return {"loss": trainer.model[0](batch[0]).square().mean()}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (counts_items, "leave out num_items"),
        (two_losses, "one loss per batch"),
        (past_the_context, r"call context\.backward\(loss\) instead of loss\.backward\(\)"),
        (past_everything, r"context\.step\(\) instead of optimizer\.step\(\)"),
        (twice_at_once, r"write self\.context\.backward\(loss\) .* in place of loss\.backward\(\)"),
        (with_a_penalty, "the loss depends on '0.weight' outside its layer"),
        (for_nothing, r"compute it under torch\.no_grad\(\)"),
        (of_half_the_batch, "'0.weight' saw 4 samples in a batch of 8"),
        (of_one_layer, "the loss does not depend on '3.weight'"),
    ],
)
def test_a_step_that_would_break_the_guarantee_is_rejected(step: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        private(train_step=step).fit(DATA)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier: expected a number that is not negative, got -1.0"),
        ({"max_grad_norm": 0}, "max_grad_norm: expected a number above 0, got 0"),
        ({"delta": 1.0}, "delta: expected a number between 0 and 1, got 1.0"),
        ({"sample_rate": 2}, "sample_rate: expected a number above 0 and at most 1, got 2"),
        ({"noise_multiplier": 1.0, "target_epsilon": 3.0}, "give one of them"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        private(privacy=settings)


def test_an_unknown_accountant_is_rejected_by_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown accountant 'gdp': did you mean 'rdp'"):
        private(privacy={"accountant": "gdp"})


def test_without_opacus_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(MissingExtraError, match=r"opacus is not installed: pip install 'dovetail\[privacy\]'"):
        private()
