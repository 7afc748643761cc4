"""The code that the design documents print runs here, with only the name of the package changed.

What is printed there as a script or a file is in `examples/`: the trial, its job and their configurations in
`examples/trial` (run by `tests/integration/test_seed_experiment.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import Epochs
from dovetail.trainers import AbstractTrainerDecorator, Trainer
from dovetail.trainers.strategies import LossCriterionStrategy, ModelUpdateStrategy

SINGLE_PROCESS = """
from dovetail.trainers import DDPTrainer, SingleProcess
single_process_trainer = SingleProcess(my_model)
ddp_trainer = DDPTrainer(trainer=single_process_trainer)
trainer = ddp_trainer
"""
SINGLE_PROCESS_AMP = """
from dovetail.trainers import DDPTrainer, SingleProcessAMP
single_process_amp_trainer = SingleProcessAMP(my_model)
ddp_trainer_with_amp = DDPTrainer(trainer=single_process_amp_trainer)
trainer = ddp_trainer_with_amp
"""
OWN_DECORATOR = """
class MyDecorator(AbstractTrainerDecorator):
    def __init__(self, trainer: Trainer):
        self.trainer = trainer  # trainer is a component of TrainerDecorator

trainer = MyDecorator(Trainer(my_model))
"""
INJECTION = """
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import *
model = my_model
trainer = ComposableTrainer(
    model=model,
    loss_strategy=CrossEntropyLossStrategy(),
    optimizer_strategy=AdamOptimizerStrategy(lr=0.001),
    training_step_strategy=DefaultTrainingStepStrategy(),
    lr_scheduler_strategy=CosineAnnealingLRSchedulerStrategy(T_max=50),
    model_update_strategy=NoOpUpdateStrategy(),
    data_loader_strategy=DefaultDataLoaderStrategy(),
)
"""
DEFAULTS = """
from dovetail.trainers.composable import ComposableTrainer

# Simplest usage - all defaults
trainer = ComposableTrainer(model=my_model)
"""
CUSTOM_LOSS = """
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import CrossEntropyLossStrategy

trainer = ComposableTrainer(
    model=my_model,
    loss_strategy=CrossEntropyLossStrategy(label_smoothing=0.1)
)
"""
MULTIPLE = """
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import (
    CrossEntropyLossStrategy,
    AdamOptimizerStrategy,
    GradientAccumulationStepStrategy,
    CosineAnnealingLRSchedulerStrategy,
)

trainer = ComposableTrainer(
    model=my_model,
    loss_strategy=CrossEntropyLossStrategy(),
    optimizer_strategy=AdamOptimizerStrategy(lr=0.001),
    training_step_strategy=GradientAccumulationStepStrategy(
        accumulation_steps=4
    ),
    lr_scheduler_strategy=CosineAnnealingLRSchedulerStrategy(T_max=50),
)
"""
INHERITANCE = """
from dovetail.trainers import basic

class MyTrainer(basic.Trainer):
    def get_loss_criterion(self):
        return MyCustomLoss()

    def get_optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.001)

    def train_step_end(self, config, batch, loss):
        # Custom logic
        super().train_step_end(config, batch, loss)

trainer = MyTrainer(model=my_model)
"""
COMPOSITION = """
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import AdamOptimizerStrategy

trainer = ComposableTrainer(
    loss_strategy=MyLossStrategy(),
    optimizer_strategy=AdamOptimizerStrategy(lr=0.001),
    model_update_strategy=MyUpdateStrategy(),
)
trainer.model = my_model
"""
BASIC = """
from dovetail.trainers import basic
trainer = basic.Trainer(model=my_model)
"""
STEPS = """
from dovetail.trainers import Trainer

class CustomTrainer(Trainer):
    def train_step(self, batch):
        x, y = batch
        outputs = self.model(x)
        loss = self.criterion(outputs, y)
        return {"loss": loss}

    def test_step(self, batch):
        x, y = batch
        outputs = self.model(x)
        loss = self.criterion(outputs, y)
        return {"loss": loss}

trainer = CustomTrainer(my_model)
"""
ADD_ONS = """
from dovetail.trainers import Trainer
from dovetail.trainers.addons import StateManagerAddon, MultiGPUAddon

ExtendedTrainer = Trainer.add_on(StateManagerAddon, MultiGPUAddon)
trainer = ExtendedTrainer(
    model, device, mode='train', optimizer=optimizer, scheduler=scheduler, save_path='checkpoints/'
)
"""
FEDERATED = """
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import AdamOptimizerStrategy
from dovetail.clients import simple
from dovetail.servers import fedavg

# Create trainer with custom strategies
trainer = ComposableTrainer(
    optimizer_strategy=AdamOptimizerStrategy(lr=0.001)
)

# Use in federated learning as usual
client = simple.Client(trainer=trainer)
server = fedavg.Server(trainer=trainer)
server.run(client)
"""


class MyLossStrategy(LossCriterionStrategy):
    def compute_loss(self, outputs: Any, labels: Any, context: Any) -> Any:
        return nn.functional.cross_entropy(outputs, labels)


class MyUpdateStrategy(ModelUpdateStrategy):
    """Every method of its kind may be left out."""


def run(block: str) -> dict[str, Any]:
    """Run a block with what its text takes for granted."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    namespace: dict[str, Any] = {
        "torch": torch,
        "my_model": model,
        "model": model,
        "device": "cpu",
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1),
        "MyCustomLoss": nn.CrossEntropyLoss,
        "MyLossStrategy": MyLossStrategy,
        "MyUpdateStrategy": MyUpdateStrategy,
        "Trainer": Trainer,
        "AbstractTrainerDecorator": AbstractTrainerDecorator,
    }
    exec(block, namespace)
    return namespace


BLOCKS = {name.lower(): text for name, text in vars().items() if name.isupper() and isinstance(text, str)}


@pytest.mark.parametrize("name", sorted(BLOCKS.keys() - {"federated"}))
def test_a_trainer_of_the_documents_learns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = run(BLOCKS[name])["trainer"]
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    data = x, (x.sum(dim=1) > 0).long()
    before = trainer.evaluate(data)["loss"]
    trainer.fit(data, data, max_length=Epochs(3))
    assert trainer.context.progress.epoch == 3
    assert trainer.evaluate(data)["loss"] < before


def test_the_federation_of_the_documents_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = run(FEDERATED)["server"].records
    assert records[-1].metrics["accuracy"] > records[0].metrics["accuracy"]
