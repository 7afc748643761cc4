from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dovetail import Batches, Epochs, Trainer
from dovetail.errors import ConfigError

X = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
Y = torch.arange(24) % 3


def make(memory_format: str | None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    settings = {
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "train_dataset": (X, Y),
        "batch_size": 8,
        "seed": 1,
        "verbose": False,
        **options,
    }
    return Trainer(model, "cpu", memory_format=memory_format, **settings)


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_channels_last_does_not_change_the_losses() -> None:
    plain, laid_out = make(None).fit(max_length=Epochs(4)), make("channels_last").fit(max_length=Epochs(4))
    assert list(laid_out.losses) == pytest.approx(list(plain.losses), abs=1e-12)


def test_channels_last_does_not_change_predictions_and_metrics() -> None:
    plain, laid_out = make(None), make("channels_last")
    torch.testing.assert_close(laid_out.predict(X), plain.predict(X))
    assert laid_out.evaluate((X, Y)) == pytest.approx(plain.evaluate((X, Y)))


def test_parameters_gradients_momentum_and_batches_are_channels_last() -> None:
    batches: list[bool] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        batches.append(is_channels_last(inputs[0]))

    trainer = make("channels_last")
    trainer.model.register_forward_pre_hook(hook)
    trainer.fit(max_length=Epochs(1))
    weight = trainer.model[0].weight
    assert batches == [True] * 3
    assert is_channels_last(weight)
    assert is_channels_last(weight.grad)
    assert is_channels_last(trainer.optimizer.state[weight]["momentum_buffer"])


def test_only_images_in_a_batch_are_converted_to_channels_last() -> None:
    trainer = make("channels_last")
    moved = trainer.to_device({"image": X, "more": [X[0], (Y, "name")]})
    assert is_channels_last(moved["image"])
    assert moved["more"][0] is not X
    assert moved["more"][0].is_contiguous()
    assert moved["more"][1][0] is Y
    assert moved["more"][1][1] == "name"


def test_without_a_memory_format_no_layout_is_changed() -> None:
    trainer = make(None)
    trainer.model.to(memory_format=torch.channels_last)
    batch = (X, Y)
    trainer.fit(max_length=Batches(1))
    assert trainer.to_device(batch) is batch
    assert is_channels_last(trainer.model[0].weight)


def test_without_a_memory_format_moving_a_batch_is_one_call() -> None:
    trainer, batch, calls = make(None), (X, Y), []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        trainer.to_device(batch)
    finally:
        sys.setprofile(None)
    assert calls == ["to_device", "to_device"]


@pytest.mark.parametrize(("saved", "loaded"), [("channels_last", None), (None, "channels_last")])
def test_a_checkpoint_is_loaded_with_or_without_channels_last(
    tmp_path: Path, saved: str | None, loaded: str | None
) -> None:
    first = make(saved)
    first.fit(max_length=Batches(4))
    first.save_checkpoint(tmp_path / "state")
    second = make(loaded)
    second.load_checkpoint(tmp_path / "state")
    for (name, value), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    second.fit(max_length=Batches(6))
    assert is_channels_last(second.model[0].weight) is (loaded == "channels_last")


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    straight = make("channels_last")
    straight.fit(max_length=Batches(8))
    first = make("channels_last")
    first.fit(max_length=Batches(4))
    first.save_checkpoint(tmp_path / "state")
    resumed = make("channels_last")
    resumed.load_checkpoint(tmp_path / "state")
    resumed.fit(max_length=Batches(8))
    assert list(resumed.history.losses) == list(straight.history.losses)
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_momentum_is_channels_last_after_loading(tmp_path: Path) -> None:
    first = make("channels_last")
    first.fit(max_length=Batches(4))
    first.save_checkpoint(tmp_path / "state")
    resumed = make("channels_last")
    resumed.load_checkpoint(tmp_path / "state")
    resumed.fit(max_length=Batches(5))
    assert is_channels_last(resumed.optimizer.state[resumed.model[0].weight]["momentum_buffer"])


def test_an_unknown_memory_format_is_rejected() -> None:
    with pytest.raises(ConfigError, match="memory_format: expected 'channels_last' or None, got 'channels_first'"):
        make("channels_first")
