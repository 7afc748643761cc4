"""Trainers: the training loop, the single-process trainer, and the layers that decorate it."""

from dovetail.trainers.capabilities import PowerSGD, find_batch_size
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.decorators import (
    AbstractTrainerDecorator,
    ActivationCheckpointTrainer,
    AMPTrainer,
    AutoBatchTrainer,
    CompiledTrainer,
    DDPTrainer,
    FSDPTrainer,
    PrivateTrainer,
    SingleProcessAMP,
    SingleProcessAmp,
    TimedTrainer,
    TrainerDecorator,
    build_trainer,
)
from dovetail.trainers.lr_finder import LRFinder, find_learning_rate
from dovetail.trainers.metrics import MeanOf, WholePass, accuracy
from dovetail.trainers.options import TrainerOptions
from dovetail.trainers.randomness import seed_everything
from dovetail.trainers.trainer import SingleProcess, Trainer

__all__ = [
    "AMPTrainer",
    "AbstractTrainerDecorator",
    "ActivationCheckpointTrainer",
    "AutoBatchTrainer",
    "CompiledTrainer",
    "DDPTrainer",
    "FSDPTrainer",
    "LRFinder",
    "MeanOf",
    "PowerSGD",
    "PrivateTrainer",
    "SingleProcess",
    "SingleProcessAMP",
    "SingleProcessAmp",
    "TimedTrainer",
    "Trainer",
    "TrainerDecorator",
    "TrainerOptions",
    "TrainingContext",
    "WholePass",
    "accuracy",
    "build_trainer",
    "find_batch_size",
    "find_learning_rate",
    "seed_everything",
]
