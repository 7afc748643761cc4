from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.trainers import AMPTrainer, Trainer
from dovetail.trainers.precision import Precision
from dovetail.units import Epochs


def train(precision: Precision, model: nn.Linear, x: torch.Tensor, rounds: int = 3) -> list[bool]:
    """Return whether each update really stepped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepped = []
    for _ in range(rounds):
        optimizer.zero_grad()
        with precision.autocast():
            loss = model(x).square().mean()
        precision.scale(loss).backward()
        precision.unscale(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepped.append(precision.step(optimizer))
        precision.update()
    return stepped


def test_scaling_changes_no_gradient_beyond_rounding() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    models = []
    for name in ("fp32", "fp16"):
        torch.manual_seed(0)
        models.append(nn.Linear(4, 2))
        assert train(Precision(name, "cpu", init_scale=256.0), models[-1], x) == [True, True, True]  # type: ignore[arg-type]
    assert (models[0].weight - models[1].weight).abs().max() < 1e-3


def test_an_overflow_skips_the_step_and_lowers_the_scale() -> None:
    precision = Precision("fp16", "cpu", init_scale=2.0**40)
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    assert train(precision, model, torch.ones(8, 4), rounds=1) == [False]
    assert torch.equal(model.weight, before)
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 2.0**39


def test_a_step_that_a_fused_optimizer_skips_is_no_update() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trainer = Trainer(model, "cpu", optimizer=lambda them: torch.optim.SGD(them, lr=0.1, fused=True), verbose=False)
    before = model.weight.detach().clone()
    batch = (torch.ones(8, 4), torch.ones(8).long())
    AMPTrainer(trainer, precision="fp16", init_scale=2.0**40).fit([batch] * 3, max_length=Epochs(1))
    assert torch.equal(model.weight, before)
    assert (trainer.context.progress.batches, trainer.context.progress.updates) == (3, 0)


def test_the_known_scale_is_the_scale_after_overflows_and_growth() -> None:
    precision, model = Precision("fp16", "cpu", init_scale=2.0**20), nn.Linear(4, 2)
    assert precision.scaler is not None
    precision.scaler.set_growth_interval(3)
    scales = []
    for _ in range(20):
        scales.append(precision.known_scale(torch.device("cpu")))
        assert scales[-1] == precision.scaler.get_scale()
        train(precision, model, torch.ones(8, 4), rounds=1)
    # It was lowered by overflows and raised after three updates.
    assert any(one > other for one, other in pairwise(scales))
    assert any(one < other for one, other in pairwise(scales))


def test_steps_of_every_new_optimizer_are_detected() -> None:
    """A round of a federation makes a new optimizer; the old one's place in memory may be taken by the new."""
    precision, model = Precision("fp16", "cpu", init_scale=256.0), nn.Linear(4, 2)
    train(precision, model, torch.ones(8, 4), rounds=1)
    # All of torch is older than this, and need not be looked through every time.
    gc.freeze()
    for _ in range(50):
        assert train(precision, model, torch.ones(8, 4), rounds=1) == [True]
        gc.collect()


def test_the_loss_scale_is_saved_in_a_checkpoint() -> None:
    one, other = Precision("fp16", "cpu", init_scale=2.0**40), Precision("fp16", "cpu")
    train(one, nn.Linear(4, 2), torch.ones(8, 4))
    other.load_state_dict(one.state_dict())
    assert one.scaler is not None
    assert other.scaler is not None
    assert other.scaler.get_scale() == one.scaler.get_scale()


def test_bf16_needs_no_scaler_and_auto_is_full_precision_on_a_cpu() -> None:
    assert Precision("bf16").scaler is None
    assert Precision("auto", "cpu").dtype is torch.float32
    assert Precision("fp32").state_dict() == {}


def test_a_scaler_update_without_a_step_does_nothing() -> None:
    Precision("fp16", "cpu").update()


def test_an_unknown_precision_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="expected 'auto', 'fp32', 'fp16' or 'bf16', got 'fp8'"):
        Precision("fp8")  # type: ignore[arg-type]
