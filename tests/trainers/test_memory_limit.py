"""Memory limits: the number of blocks that are computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.trainers import ActivationCheckpointTrainer, Trainer
from dovetail.trainers.capabilities import ActivationCheckpointing
from dovetail.trainers.memory_limit import limit_memory
from dovetail.trainers.memory_plan import plan_memory
from dovetail.units import Epochs

DATA = torch.linspace(-1, 1, 256 * 16).reshape(256, 16), torch.arange(256) % 2


def build(kind: Any = Trainer) -> Any:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for _ in range(5)]
    return kind(nn.Sequential(*blocks, nn.Linear(16, 2)), "cpu", batch_size=256, seed=0, verbose=False)


def peak(number: int) -> int:
    trainer = ActivationCheckpointTrainer(build())
    trainer.num_recomputed = number
    return plan_memory(trainer, DATA).peak


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("is_addon", [False, True])
def test_a_limit_needs_the_fewest_blocks_that_fit(number: int, is_addon: bool) -> None:
    trainer = build(Trainer.add_on(ActivationCheckpointing)) if is_addon else ActivationCheckpointTrainer(build())
    # Between the peaks of two neighbours, because a few bytes depend on when Python frees a tensor.
    memory = peak(number) + 1000
    assert number == 0 or peak(number - 1) > memory
    plan = limit_memory(trainer, memory, DATA)
    assert (plan.fits, trainer.num_recomputed) == (True, number)


def test_a_run_within_a_limit_has_the_bits_of_a_run_without() -> None:
    plain, limited = build(), ActivationCheckpointTrainer(build())
    limit_memory(limited, peak(2) + 1000, DATA)
    for each in (plain, limited):
        each.fit(DATA, max_length=Epochs(2))
    assert limited.recomputed_blocks == ["0", "2"]
    assert all(map(torch.equal, plain.model.parameters(), limited.model.parameters()))


def test_a_step_that_fits_in_no_way_is_one_clear_error() -> None:
    trainer = ActivationCheckpointTrainer(build())
    with pytest.raises(ConfigError, match=r"memory: 1\.00 kB is too little: with all 5 blocks computed again, a step"):
        limit_memory(trainer, 1000, DATA)
    assert trainer.num_recomputed is None


def test_a_limit_without_activation_checkpointing_is_rejected() -> None:
    with pytest.raises(ConfigError, match="limit_memory: no layer computes blocks again; use ActivationCheckpoint"):
        limit_memory(build(), 10**9, DATA)
