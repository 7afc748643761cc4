"""Sharded models that are built without data, or whose shards are on the host: two gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import Batches
from dovetail.errors import ConfigError
from dovetail.trainers import FSDPTrainer, Trainer

SCRIPT = Path(__file__).with_name("memory_ranks.py")


@pytest.mark.slow
def test_models_on_the_host_or_without_data_train_with_the_same_bits(run_group: Any, tmp_path: Path) -> None:
    first, second = run_group(SCRIPT, 2, tmp_path / "ranks")
    for each in (first, second):
        assert each["offloaded"] == each["usual"]
        assert each["deferred, not tied"] == each["usual, not tied"]
        # A shared weight is drawn by its first module only, so its numbers differ from the numbers of a usual model.
        assert each["deferred and offloaded"] == each["deferred"]
        assert each["is tied"]
    assert first["held"] + second["held"] == first["all"]


def test_a_single_process_initializes_a_model_without_data() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8), nn.BatchNorm1d(6), nn.Linear(6, 3))

    torch.manual_seed(3)
    expected = model()
    with torch.device("meta"):
        deferred = model()
    data = torch.ones(8, 6), torch.zeros(8, dtype=torch.long)
    trainer = FSDPTrainer(Trainer(deferred, "cpu", seed=3, learning_rate=0.0, weight_decay=0.0, verbose=False))
    trainer.fit(data, max_length=Batches(1))
    torch.testing.assert_close(list(deferred.parameters()), list(expected.parameters()), rtol=0, atol=0)


def test_a_module_without_reset_parameters_is_one_clear_error() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    trainer = FSDPTrainer(Trainer(model, "cpu", verbose=False))
    with pytest.raises(ConfigError, match="1 was built on the device 'meta' and has no method reset_"):
        trainer.fit((torch.ones(4, 3), torch.zeros(4, dtype=torch.long)), max_length=Batches(1))
