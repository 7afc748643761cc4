"""Types of layers: `make types` fails if a type checker does not accept a layer as a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from problem import Problem

from dovetail.trainers import AMPTrainer, DDPTrainer, Trainer, TrainerDecorator


def train(trainer: Trainer) -> float:
    trainer.options.num_epochs = 1
    return trainer.train()


def core_of(layer: TrainerDecorator) -> Trainer:
    return layer.core


@pytest.mark.parametrize("kind", [AMPTrainer, DDPTrainer, TrainerDecorator])
def test_a_layer_is_a_trainer(problem: Problem, kind: type[TrainerDecorator], tmp_path: Path) -> None:
    inner = Trainer(problem.model(), "cpu", train_dataset=problem.batches, checkpoint_dir=tmp_path, verbose=False)
    layer: Trainer = kind(inner)
    assert train(layer) > 0
    assert inner.context.progress.epoch == 1


def test_the_core_of_a_layer_is_the_trainer_inside(problem: Problem) -> None:
    inner = Trainer(problem.model(), "cpu", verbose=False)
    assert core_of(AMPTrainer(DDPTrainer(inner))) is inner
    assert DDPTrainer(inner).unwrap() is inner
