from __future__ import annotations

import pytest
import torch
from problem import Problem

from dovetail import Trainer
from dovetail.errors import UnknownNameError
from dovetail.trainers import basic, registry
from dovetail.trainers.composable import ComposableTrainer


def test_trainers_are_registered_by_name() -> None:
    assert registry.get("basic") is basic.Trainer
    assert registry.get("composable") is ComposableTrainer
    with pytest.raises(UnknownNameError, match="unknown trainer 'composible': did you mean 'composable'"):
        registry.get("composible")


@pytest.mark.parametrize(
    "name", ["Adam", "Adadelta", "Adagrad", "AdamW", "SparseAdam", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam",
             "RMSprop", "Rprop", "SGD"],
)  # fmt: skip
def test_plato_optimizers_are_registered_by_name(name: str) -> None:
    assert registry.optimizers.get(name) is getattr(torch.optim, name)


@pytest.mark.parametrize(
    "name", ["L1Loss", "MSELoss", "BCELoss", "BCEWithLogitsLoss", "NLLLoss", "PoissonNLLLoss", "CrossEntropyLoss",
             "HingeEmbeddingLoss", "MarginRankingLoss", "TripletMarginLoss", "KLDivLoss"],
)  # fmt: skip
def test_plato_losses_are_registered_by_name(name: str) -> None:
    assert registry.losses.get(name) is getattr(torch.nn, name)


@pytest.mark.parametrize(
    "name", ["CosineAnnealingLR", "LambdaLR", "MultiStepLR", "StepLR", "ReduceLROnPlateau", "ConstantLR", "LinearLR",
             "ExponentialLR", "CyclicLR", "CosineAnnealingWarmRestarts", "ChainedScheduler", "SequentialLR"],
)  # fmt: skip
def test_plato_schedulers_are_registered_by_name(name: str) -> None:
    assert registry.schedulers.get(name) is getattr(torch.optim.lr_scheduler, name)


def test_a_user_registered_class_is_found_by_its_name(problem: Problem) -> None:
    @registry.optimizers.register("HalfSGD")
    class HalfSGD(torch.optim.SGD):
        pass

    trainer = Trainer(problem.model(), optim_function="HalfSGD", learning_rate=0.1, verbose=False)
    assert isinstance(trainer.optimizer, HalfSGD)
