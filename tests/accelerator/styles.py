"""One training run in five styles, on the CPU or the pretend device, and the transfers of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pretend_device import PretendDevice
from torch import Tensor, nn

from dovetail import Epochs, Trainer, pytorch
from dovetail.callbacks import EMA, EarlyStopping
from dovetail.trainers import AMPTrainer, loop
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import CrossEntropyLossStrategy, DefaultTrainingStepStrategy, SGDOptimizerStrategy

# The loop also reports once a second. This would be a read of the device in a slow step.
loop._SLOWEST_REPORT = math.inf

EPOCHS = 2
NUM_BATCHES = 6
SETTINGS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **SETTINGS)


Batch = tuple[Tensor, Tensor]


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8 * NUM_BATCHES, 6, generator=generator)
    return list(zip(x.split(8), (x[:, :3]).argmax(dim=1).split(8), strict=True))  # type: ignore[no-untyped-call]


class Net(nn.Module):
    """A small classifier that notes, at the start of every training step, how many transfers there were."""

    def __init__(self, device: PretendDevice | None, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 3))
        self.device = device
        self.marks: list[int] = []

    def forward(self, x: Tensor) -> Any:
        if self.training and self.device is not None:
            self.marks.append(len(self.device.events))
        return self.layers(x)

    def __deepcopy__(self, memo: Any) -> Net:
        # The average of the weights copies the model; the device is one.
        clone = Net(self.device)
        clone.load_state_dict(self.state_dict())
        return clone.to(next(self.parameters()).device)


@dataclass(frozen=True)
class Feature:
    """Settings, layers and callbacks of a run."""

    options: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] = lambda trainer: trainer
    callbacks: Callable[[], list[Any]] = list
    validates: bool = False
    precision: Any = None


FEATURES = {
    "plain": Feature(),
    "bf16": Feature(wrap=partial(AMPTrainer, precision="bf16"), precision="bf16"),
    "fp16": Feature(wrap=partial(AMPTrainer, precision="fp16"), precision="fp16"),
    "accumulation": Feature({"accumulation_steps": 4}),
    "clipping": Feature({"gradient_clip": 0.1}),
    "ema": Feature(callbacks=lambda: [EMA(0.9)]),
    "early_stopping": Feature(callbacks=lambda: [EarlyStopping("valid_loss", patience=1)], validates=True),
}


def _fit(trainer: Any, feature: Feature, model: nn.Module) -> nn.Module:
    batches = make_batches()
    val_data = batches if feature.validates else None
    feature.wrap(trainer).fit(batches, val_data, max_length=Epochs(EPOCHS))
    return model


def _settings(feature: Feature) -> dict[str, Any]:
    return {"seed": 1, "verbose": False, "print_every": 10**6, "callbacks": feature.callbacks(), **feature.options}


def keywords(device: str, model: Net, feature: Feature) -> nn.Module:
    trainer = Trainer(model, device, optimizer=make_optimizer, criterion=nn.CrossEntropyLoss(), **_settings(feature))
    return _fit(trainer, feature, model)


class StepTrainer(Trainer):
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.model(x), y)}

    test_step = train_step


def subclass(device: str, model: Net, feature: Feature) -> nn.Module:
    return _fit(StepTrainer(model, device, optimizer=make_optimizer, **_settings(feature)), feature, model)


def strategies(device: str, model: Net, feature: Feature) -> nn.Module:
    trainer = ComposableTrainer(
        model=model,
        device=device,
        loss_strategy=CrossEntropyLossStrategy(),
        optimizer_strategy=SGDOptimizerStrategy(**SETTINGS),
        training_step_strategy=DefaultTrainingStepStrategy(),
        **_settings(feature),
    )
    return _fit(trainer, feature, model)


def manual(device: str, model: Net, feature: Feature) -> nn.Module:
    def train_step(trainer: Trainer, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        loss = nn.functional.cross_entropy(trainer.model(x), y)
        trainer.context.backward(loss)
        trainer.context.step(*trainer.context.optimizers)
        return {"loss": loss}

    trainer = Trainer(model, device, optimizer=make_optimizer, train_step=train_step, **_settings(feature))
    return _fit(trainer, feature, model)


class NetTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, model: Net, feature: Feature) -> None:
        self.context = context
        self.max_norm = feature.options.get("gradient_clip")
        if feature.precision is not None:
            context.experimental.use_amp(feature.precision)
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(make_optimizer(self.model.parameters()))

    def build_training_data_loader(self) -> Any:
        x, y = (torch.cat(column) for column in zip(*make_batches(), strict=True))
        return pytorch.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Mapping[str, Any]:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip if self.max_norm else None)
        return {"loss": loss}

    def clip(self, parameters: Any) -> None:
        nn.utils.clip_grad_norm_(parameters, self.max_norm or 0.0)


def trial(device: str, model: Net, feature: Feature) -> nn.Module:
    """A trial selects its device itself: the accelerator, if there is one."""
    torch.manual_seed(1)
    num_batches = feature.options.get("accumulation_steps", 1)
    context = pytorch.init(hparams={}, checkpoint_dir=None, verbose=False, aggregation_frequency=num_batches)
    made = context.build_trial(NetTrial, model=model, feature=feature)
    context.fit(made, max_length=Epochs(EPOCHS))
    return made.model


Style = Callable[[str, Net, Feature], nn.Module]
STYLES: dict[str, Style] = {
    "keywords": keywords,
    "subclass": subclass,
    "strategies": strategies,
    "manual": manual,
    "trial": trial,
}
