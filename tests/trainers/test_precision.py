from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.trainers.precision import Precision


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
