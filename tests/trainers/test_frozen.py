"""Checkpoints that hold only what trains, with models of plain torch."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from dovetail import Batches, Epochs, Trainer, checkpoint
from dovetail.callbacks import EMA, Callback
from dovetail.cli import app
from dovetail.errors import CheckpointError
from dovetail.trainers.frozen import SECTION

SETTINGS: dict[str, Any] = {"optim_function": "Adam", "learning_rate": 0.01, "verbose": False, "seed": 3}
SETTINGS |= {"save_only_trainable": True, "batch_size": 5, "drop_last": False}


class Net(nn.Module):
    """A large frozen block, a batch norm whose statistics change, a teacher that follows the head, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 6)).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 3))
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("table", torch.arange(4000.0))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.norm(self.base(inputs))
        outputs: Tensor = self.head(features) + self.teacher(features)
        return outputs


class FollowHead(Callback):
    def on_update(self, context: Any) -> None:
        for teacher, student in zip(context.model.teacher.parameters(), context.model.head.parameters(), strict=True):
            # Through `data`, which torch does not count as a change of the parameter.
            teacher.data.lerp_(student.data, 0.1)


class Unfreeze(Callback):
    """Trains a frozen layer in the second epoch alone."""

    def on_epoch_start(self, context: Any) -> None:
        context.model.base[2].requires_grad_(context.progress.epoch == 1)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(23, 4, generator=generator), torch.arange(23) % 3


def trainer(folder: Path, model: nn.Module | None = None, **more: Any) -> Any:
    callbacks = [FollowHead(), Unfreeze(), EMA(0.9)]
    settings = {**SETTINGS, "callbacks": callbacks, "checkpoint_dir": folder, "save_every": 3, **more}
    return Trainer(net() if model is None else model, "cpu", **settings)


def assert_equal_weights(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


class KillAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_step_end(self, context: Any, output: Any) -> None:
        if context.progress.batches + 1 >= self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


def files_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    from forked import run

    straight = trainer(tmp_path / "straight")
    history = straight.fit(data(), data(), max_length=Epochs(4))
    # Before the layer trains, while it trains, and after it is frozen again.
    for killed_at in (5, 8, 14, 17):
        folder = tmp_path / str(killed_at)
        killed = run(Path(__file__), folder, killed_at, folder=tmp_path)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        second = trainer(folder)
        again = second.fit(data(), data(), max_length=Epochs(4), resume="auto")
        assert_equal_weights(straight.model, second.model)
        for name in ("train_loss", "valid_loss", "valid_accuracy"):
            assert again.get_metric_values(name) == history.get_metric_values(name)


def test_only_tensors_that_change_are_stored(tmp_path: Path) -> None:
    ours = trainer(tmp_path, save_every=5)
    ours.fit(data(), max_length=Epochs(3))
    first, second = (set(checkpoint.load(tmp_path / f"ck_epoch_{epoch}_iter_{5 * epoch}")["model"]) for epoch in (1, 2))
    changing = {
        f"{block}.{layer}.{kind}" for block in ("head", "teacher") for layer in (0, 2) for kind in ("weight", "bias")
    }
    assert first == changing | {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert second - first == {"base.2.weight", "base.2.bias"}


def test_the_size_of_a_checkpoint_is_the_size_of_what_trains(tmp_path: Path) -> None:
    sizes = {}
    for width in (10, 100_000):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 3))
        model[:2].requires_grad_(False)
        for only in (False, True):
            ours = Trainer(model, "cpu", **{**SETTINGS, "save_only_trainable": only})
            ours.fit(data(), max_length=Batches(2))
            sizes[width, only] = files_size(ours.save_checkpoint(tmp_path / f"{width} {only}"))
    # The frozen layers have 3.6 MB; the rest is the head, its optimizer, counters and random states.
    assert sizes[100_000, False] > 3_600_000
    assert sizes[100_000, True] < 40_000
    assert abs(sizes[100_000, True] - sizes[10, True]) < 300


def test_another_base_is_rejected_with_one_sentence_and_nothing_changes(tmp_path: Path) -> None:
    trainer(tmp_path).fit(data(), max_length=Epochs(1))
    path = tmp_path / "ck_epoch_1_iter_5"
    other = trainer(tmp_path, net(seed=1))
    before = copy.deepcopy(other.model.state_dict())
    for load in (other.load_checkpoint, other.load_model):
        with pytest.raises(
            CheckpointError,
            match=r"holds only what was trained, on a frozen base of 7 tensors with the SHA-256 \w{16}…, but the model "
            r"has 7 others with \w{16}…; give the trainer a model with the same base weights$",
        ):
            load(path)
    assert all(torch.equal(before[name], it) for name, it in other.model.state_dict().items())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one bit": lambda model: model.base[0].weight.data.view(torch.int32)[7].bitwise_xor_(1),
    "order": lambda model: model.table.copy_(model.table.flip(0)),
    "dtype": lambda model: model.base[0].double(),
    "shape": lambda model: setattr(model, "table", model.table.view(40, 100)),
    "name": lambda model: model.register_buffer("another", torch.zeros(0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_of_the_base_is_found(tmp_path: Path, change: str) -> None:
    trainer(tmp_path).fit(data(), max_length=Epochs(1))
    model = net()
    CHANGES[change](model)
    with pytest.raises(CheckpointError, match="on a frozen base of 7 tensors"):
        trainer(tmp_path, model).load_checkpoint(tmp_path / "ck_epoch_1_iter_5")


def test_weights_load_without_the_option_and_complete_checkpoints_with_it(tmp_path: Path) -> None:
    ours = trainer(tmp_path / "small")
    ours.fit(data(), max_length=Epochs(1))
    small = tmp_path / "small" / "ck_epoch_1_iter_5"
    for load in ("load_model", "load_checkpoint"):
        loaded = trainer(tmp_path / "other", save_only_trainable=False)
        getattr(loaded, load)(small)
        assert_equal_weights(ours.model, loaded.model)
    large = loaded.save_checkpoint(tmp_path / "large")
    assert SECTION not in checkpoint.load(large)
    # The statistics of the batch norm differ from a new model, so the next small checkpoint has them.
    again = trainer(tmp_path / "again")
    again.fit(data(), max_length=Epochs(2), resume=large)
    newest = trainer(tmp_path / "again")
    newest.load_checkpoint(tmp_path / "again" / "ck_epoch_2_iter_10")
    assert_equal_weights(again.model, newest.model)


def test_the_option_can_be_assigned_and_has_no_effect_on_other_trainers(tmp_path: Path) -> None:
    ours = trainer(tmp_path, save_only_trainable=False)
    ours.options.save_only_trainable = True
    assert SECTION in checkpoint.load(ours.save_checkpoint(tmp_path / "one"))
    twin = copy.deepcopy(ours)
    twin.model.base[0].weight.data.zero_()
    assert SECTION in checkpoint.load(twin.save_checkpoint(tmp_path / "two"))
    with pytest.raises(CheckpointError, match="on a frozen base"):
        ours.load_checkpoint(tmp_path / "two")
    ours.options.save_only_trainable = False
    assert SECTION not in checkpoint.load(ours.save_checkpoint(tmp_path / "three"))


def test_a_checkpoint_without_its_base_cannot_be_exported(tmp_path: Path) -> None:
    path = trainer(tmp_path).save_checkpoint(tmp_path / "small")
    done = CliRunner().invoke(app, ["checkpoint", "export", str(path), "-o", str(tmp_path / "model.safetensors")])
    assert isinstance(done.exception, CheckpointError)
    assert "without the 14 tensors of its frozen base; load it with a trainer" in str(done.exception)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_dry_run_does_not_change_the_base(tmp_path: Path) -> None:
    ours = trainer(tmp_path / "ours")
    ours.fit(data(), data(), max_length=Epochs(1), dry_run=True)
    ours.fit(data(), max_length=Epochs(1))
    again = trainer(tmp_path / "again")
    again.load_checkpoint(tmp_path / "ours" / "ck_epoch_1_iter_5")
    assert_equal_weights(ours.model, again.model)


if __name__ == "__main__":
    killed = trainer(Path(sys.argv[1]), save_in_background=int(sys.argv[2]) == 8)
    killed.context.callbacks.add(KillAt(int(sys.argv[2])))
    killed.fit(data(), data(), max_length=Epochs(4))
