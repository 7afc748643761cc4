"""Epochs that are resumed with another batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from torch import nn
from torch.utils.data import TensorDataset

from dovetail.callbacks import Callback
from dovetail.errors import DataError
from dovetail.trainers import Trainer
from dovetail.units import Batches, Epochs


class Samples(Callback):
    """Collects the samples of every batch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_start(self, context: Any, batch: Any) -> None:
        self.seen += batch[0][:, 0].int().tolist()


def _numbered(batch_size: int, folder: Path, *, has_own_loader: bool) -> tuple[Trainer, Samples]:
    x = torch.arange(50.0)[:, None]
    samples = Samples()
    data: Any = (x, x)
    if has_own_loader:
        data = torch_data.DataLoader(TensorDataset(x, x), batch_size=batch_size, shuffle=True)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(1, 1),
        "cpu",
        criterion=nn.MSELoss(),
        learning_rate=1e-6,
        batch_size=batch_size,
        drop_last=False,
        train_dataset=data,
        seed=1,
        verbose=False,
        checkpoint_dir=folder,
        callbacks=[samples],
    )
    return trainer, samples


@pytest.mark.parametrize("has_own_loader", [False, True])
@pytest.mark.parametrize("batch_size", [2, 7, 10, 20])
def test_an_epoch_resumed_with_another_batch_size_reads_every_sample_once(
    tmp_path: Path, batch_size: int, has_own_loader: bool
) -> None:
    whole, expected = _numbered(4, tmp_path / "whole", has_own_loader=has_own_loader)
    whole.fit(max_length=Epochs(2))
    first, seen = _numbered(4, tmp_path / "ck", has_own_loader=has_own_loader)
    first.fit(max_length=Batches(5))
    second, rest = _numbered(batch_size, tmp_path / "ck", has_own_loader=has_own_loader)
    if batch_size == 7:
        with pytest.raises(DataError, match="after 20 samples in batches of 4, and batches of 7"):
            second.fit(max_length=Epochs(2), resume="auto")
        return
    second.fit(max_length=Epochs(1), resume="auto")
    assert seen.seen + rest.seen == expected.seen[:50]
    assert (second.context.progress.records, second.context.progress.batches) == (50, 5 + -(-30 // batch_size))
    second.fit(max_length=Epochs(2))
    assert sorted(rest.seen[30:]) == list(range(50))
