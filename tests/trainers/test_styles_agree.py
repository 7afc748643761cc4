"""One run in every style of the library: bit-equal weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand
from torch import Tensor, nn

from dovetail import Epochs, Trainer, pytorch
from dovetail.compat import lernomatic, plato, zae_engine
from dovetail.data import DataLoader
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import CrossEntropyLossStrategy, DefaultTrainingStepStrategy, SGDOptimizerStrategy

EPOCHS = 3
SETTINGS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **SETTINGS)


def by_hand(problem: Problem) -> nn.Module:
    model = problem.model()
    train_by_hand(model, problem.batches, make_optimizer(model), EPOCHS)
    return model


def keywords(problem: Problem) -> nn.Module:
    """lernomatic: everything is a keyword, then `.train()`."""
    trainer = Trainer(
        problem.model(),
        num_epochs=EPOCHS,
        learning_rate=SETTINGS["lr"],
        momentum=SETTINGS["momentum"],
        weight_decay=SETTINGS["weight_decay"],
        optim_function="SGD",
        loss_function="CrossEntropyLoss",
        train_dataset=(problem.x, problem.y),
        batch_size=8,
        shuffle=False,
        save_every=0,
        save_hist=False,
        verbose=False,
    )
    trainer.train()
    return trainer.model


def fit_with_pieces(problem: Problem) -> nn.Module:
    """Pieces, and `fit`."""
    model = problem.model()
    trainer = Trainer(model, optimizer=partial(torch.optim.SGD, **SETTINGS), verbose=False)
    trainer.fit(problem.batches, max_length=Epochs(EPOCHS))
    return model


def subclass_of_steps(problem: Problem) -> nn.Module:
    """zae-engine: `train_step` and `test_step` return dicts, then `.run(n, loader)`."""

    class CustomTrainer(zae_engine.Trainer):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            x, y = batch
            return {"loss": self.criterion(self.model(x), y)}

        def test_step(self, batch: Any) -> Mapping[str, Any]:
            return self.train_step(batch)

    model = problem.model()
    trainer = CustomTrainer(
        model, "cpu", mode="train", optimizer=make_optimizer(model), criterion=nn.CrossEntropyLoss(), log_bar=False
    )
    loader = DataLoader(torch.utils.data.TensorDataset(problem.x, problem.y), batch_size=8)
    trainer.run(1, loader)
    trainer.run(EPOCHS - 1, loader)
    return model


def subclass_of_seams(problem: Problem) -> nn.Module:
    """plato: override what is made, then `train(trainset, sampler)`."""

    class MyTrainer(plato.Trainer):
        def get_loss_criterion(self) -> Callable[[Any, Any], Tensor]:
            return nn.CrossEntropyLoss()

        def get_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return make_optimizer(model)

        def train_step_end(self, config: Mapping[str, Any], batch: Any = None, loss: Any = None) -> None:
            super().train_step_end(config, batch, loss)

    trainer = MyTrainer(problem.model, num_epochs=EPOCHS, batch_size=8, shuffle=False, verbose=False)
    trainer.train(torch.utils.data.TensorDataset(problem.x, problem.y), sampler=range(96))
    return trainer.model


def own_epochs(problem: Problem) -> nn.Module:
    """lernomatic's subclass: a `train_epoch` that loops itself, through the context."""

    class OwnEpochs(lernomatic.Trainer):
        def train_epoch(self) -> None:
            for x, y in self.train_loader:
                self.context.backward(self.criterion(self.model(x), y))
                self.context.step()

        def val_epoch(self) -> None:
            pass

    model = problem.model()
    trainer = OwnEpochs(model, optimizer=make_optimizer(model), num_epochs=EPOCHS, verbose=False, save_every=0)
    trainer.set_train_dataset(problem.batches)
    trainer.train()
    return model


def own_passes(problem: Problem) -> nn.Module:
    """plato's subclass that owns the whole step."""

    class OwnPasses(plato.Trainer):
        def perform_forward_and_backward_passes(self, config: Mapping[str, Any], examples: Any, labels: Any) -> Tensor:
            optimizer = self.context.optimizers[0]
            optimizer.zero_grad()
            loss: Tensor = self.criterion(self.model(examples), labels)
            loss.backward()
            optimizer.step()
            return loss

    model = problem.model()
    trainer = OwnPasses(model, optimizer=make_optimizer(model), verbose=False)
    trainer.fit(problem.batches, max_length=Epochs(EPOCHS))
    assert trainer.context.progress.updates == EPOCHS * len(problem.batches)
    return model


def manual(problem: Problem) -> nn.Module:
    """A step that optimises by hand, through the context."""

    def train_step(trainer: Trainer, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        loss = trainer.criterion(trainer.model(x), y)
        trainer.context.backward(loss)
        trainer.context.step(trainer.optimizer)
        return {"loss": loss}

    model = problem.model()
    trainer = Trainer(model, optimizer=make_optimizer(model), train_step=train_step, verbose=False)
    trainer.fit(problem.batches, max_length=Epochs(EPOCHS))
    return model


def composable(problem: Problem) -> nn.Module:
    """plato's strategies: everything is injected, then `train_model(config, trainset, sampler)`."""
    trainer = ComposableTrainer(
        model=problem.model,
        loss_strategy=CrossEntropyLossStrategy(),
        optimizer_strategy=SGDOptimizerStrategy(**SETTINGS),
        training_step_strategy=DefaultTrainingStepStrategy(),
        verbose=False,
    )
    trainer.train_model({"epochs": EPOCHS, "batch_size": 8}, torch.utils.data.TensorDataset(problem.x, problem.y))
    return trainer.model


def basic_with_strategies(problem: Problem) -> nn.Module:
    """Strategies, plain callables among them, in the trainer that one subclasses."""
    model = problem.model()
    trainer = Trainer(
        model,
        loss_strategy=nn.functional.cross_entropy,
        optimizer_strategy=partial(torch.optim.SGD, **SETTINGS),
        training_step_strategy=DefaultTrainingStepStrategy,
        verbose=False,
    )
    trainer.fit(problem.batches, max_length=Epochs(EPOCHS))
    return model


class ProblemTrial(pytorch.PyTorchTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext, problem: Problem) -> None:
        self.context = context
        self.problem = problem
        self.model = context.wrap_model(problem.model())
        self.optimizer = context.wrap_optimizer(make_optimizer(self.model))

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(torch.utils.data.TensorDataset(self.problem.x, self.problem.y), batch_size=8)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Mapping[str, Any]:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}


def trial(problem: Problem) -> nn.Module:
    """Determined: a trial, and a context that fits it."""
    context = pytorch.init(hparams={}, checkpoint_dir=None, verbose=False)
    made = context.build_trial(ProblemTrial, problem=problem)
    context.fit(made, max_length=Epochs(EPOCHS))
    return made.model


STYLES = [
    keywords,
    fit_with_pieces,
    subclass_of_steps,
    subclass_of_seams,
    own_epochs,
    own_passes,
    manual,
    composable,
    basic_with_strategies,
    trial,
]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_styles_agree(problem: Problem, style: Callable[[Problem], nn.Module]) -> None:
    assert_same_weights(style(problem), by_hand(problem))
