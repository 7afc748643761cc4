"""Decorators and add-ons: the same capabilities on an object and on a class, with results that are equal bit for bit.

This example runs in one process; `ddp.py` uses several.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from dovetail import Epochs
from dovetail.data import DataLoader, digits
from dovetail.trainers import DDPTrainer, SingleProcess, SingleProcessAMP, Trainer, build_trainer
from dovetail.trainers.addons import MultiGPUAddon, PrecisionMixerAddon, StateManagerAddon

training, test = digits(split=(0.8, 0.2))
settings: dict[str, Any] = {"learning_rate": 1e-2, "num_epochs": 4, "seed": 0, "verbose": False}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


# Decorators add a capability to an object.

single_process_trainer = SingleProcess(make_model, **settings)
ddp_trainer = DDPTrainer(trainer=single_process_trainer)
ddp_trainer.fit(training, test)

single_process_amp_trainer = SingleProcessAMP(make_model, precision="bf16", **settings)
ddp_trainer_with_amp = DDPTrainer(trainer=single_process_amp_trainer)
ddp_trainer_with_amp.fit(training, test)

# The same layers by name, and by class method.

by_name = build_trainer("ddp-amp", make_model, precision="bf16", **settings)
by_name.fit(training, test)
by_method = DDPTrainer.from_single_process(make_model, amp=True, precision="bf16", **settings)
by_method.fit(training, test)

# Add-ons add a capability to a class.

mixed = Trainer.add_on(PrecisionMixerAddon, MultiGPUAddon)(make_model, precision="bf16", **settings)
mixed.fit(training, test)

print("by name, by method and as add-ons:", [same(ddp_trainer_with_amp, it) for it in (by_name, by_method, mixed)])
assert same(ddp_trainer_with_amp, by_name)
assert same(ddp_trainer_with_amp, by_method)
assert same(ddp_trainer_with_amp, mixed)
assert not same(ddp_trainer_with_amp, ddp_trainer)

# Saved state and several devices. A list of devices starts one process per device.

with TemporaryDirectory() as folder:
    torch.manual_seed(0)
    model, device = make_model(), "cpu"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    ExtendedTrainer = Trainer.add_on(StateManagerAddon, MultiGPUAddon)
    trainer = ExtendedTrainer(
        model, device, mode="train", optimizer=optimizer, scheduler=scheduler, save_path=folder, log_bar=False
    )
    loaders = DataLoader(training, batch_size=64, shuffle=True), DataLoader(test, batch_size=256)
    trainer.fit(*loaders, max_length=Epochs(4))
    print(f"went on from {trainer.load_state().name}")

accuracies = [it.evaluate(test)["accuracy"] for it in (ddp_trainer, ddp_trainer_with_amp, trainer)]
print(f"result: test accuracy {', '.join(f'{it:.1%}' for it in accuracies)} (plain, mixed precision, add-ons)")
assert min(accuracies) > 0.9
