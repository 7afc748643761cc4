"""Claims about plans of memory and activation checkpointing on the pretend device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pretend_device import NAME, PretendDevice
from run_claims import assert_equal, make_trainer, weights
from styles import make_batches
from torch import Tensor, nn

from dovetail import Epochs, Trainer
from dovetail.trainers import ActivationCheckpointTrainer, AMPTrainer
from dovetail.trainers.memory_plan import plan_memory


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # With this share the CPU and the device scale by a power of two, so they round alike.
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.dropout(torch.tanh(self.linear(x)))
        return outputs


class Blocks(nn.Module):
    def __init__(self, passes: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.passes = passes

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.passes(block, x)
        return self.head(x)


def recomputed_blocks_draw_the_same_numbers_on_the_device() -> None:
    ways: tuple[Callable[[nn.Module, Tensor], Tensor], ...] = (lambda block, x: block(x), lambda block, x: block(x=x))
    wraps: tuple[Callable[[Trainer], Trainer], ...] = (lambda trainer: trainer, partial(AMPTrainer, precision="bf16"))
    for passes in ways:
        for wrap in wraps:
            stored = wrap(make_trainer("cpu", Blocks(passes)))
            stored.fit(make_batches(), max_length=Epochs(1))
            with PretendDevice():
                recomputed = wrap(ActivationCheckpointTrainer(make_trainer(NAME, Blocks(passes))))
                recomputed.fit(make_batches(), max_length=Epochs(1))
                assert_equal(weights(stored), weights(recomputed))


def build(device: str, wrap: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3)]
    criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    settings: dict[str, Any] = {"criterion": criterion, "seed": 1, "memory_format": "channels_last"}
    return wrap(Trainer(nn.Sequential(*layers), device, optimizer=optimizer, verbose=False, **settings))


def a_plan_of_a_trainer_on_the_device_is_the_plan_of_the_cpu() -> None:
    batches = make_batches()
    wraps: tuple[Any, ...] = (lambda trainer: trainer, *(partial(AMPTrainer, precision=it) for it in ("bf16", "fp16")))
    for wrap in wraps:
        planned = plan_memory(build("cpu", wrap), batches)
        with PretendDevice():
            trainer = build(NAME, wrap)
            assert plan_memory(trainer, batches) == planned
            # The model stays where it is.
            assert {it.device.type for it in trainer.model.parameters()} == {"cpu"}
            assert trainer.context.device.type == NAME


def a_plan_does_not_change_a_trainer_that_has_trained_on_the_device() -> None:
    batches = make_batches()
    for wrap in (lambda trainer: trainer, partial(AMPTrainer, precision="bf16")):
        with PretendDevice() as device:
            trainers = [build(NAME, wrap) for _ in range(2)]
            for trainer in trainers:
                trainer.fit(batches, max_length=Epochs(1))
            device.events.clear()
            again = plan_memory(trainers[0], batches)
            assert {it.device.type for it in trainers[0].model.parameters()} == {NAME}
            for trainer in trainers:
                trainer.fit(batches, max_length=Epochs(2))
            assert_equal(weights(trainers[0]), weights(trainers[1]))
            fresh = plan_memory(build("cpu", wrap), batches)
        assert again.kinds["optimizer"] == fresh.kinds["optimizer"]
        # Besides, the weights of the classes are on the CPU.
        assert 0 <= again.peak - fresh.peak <= 12


MEMORY_CLAIMS = {
    claim.__name__.replace("_", " "): claim
    for claim in (
        recomputed_blocks_draw_the_same_numbers_on_the_device,
        a_plan_of_a_trainer_on_the_device_is_the_plan_of_the_cpu,
        a_plan_does_not_change_a_trainer_that_has_trained_on_the_device,
    )
}
