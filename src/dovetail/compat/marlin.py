"""PyMarlin's names for trainer backends: one process or several, full or mixed precision, and their factory."""

from dovetail.trainers import AbstractTrainerDecorator, DDPTrainer, SingleProcess, SingleProcessAMP, SingleProcessAmp
from dovetail.trainers import build_trainer as build_trainer_backend
from dovetail.trainers.trainer import Trainer

__all__ = [
    "AbstractTrainerBackendDecorator",
    "AbstractTrainerDecorator",
    "DDPTrainer",
    "DDPTrainerBackend",
    "SingleProcess",
    "SingleProcessAMP",
    "SingleProcessAmp",
    "Trainer",
    "build_trainer_backend",
]

# In PyMarlin, the part that runs the loop is a backend beside the trainer; here the trainer itself does.
AbstractTrainerBackendDecorator = AbstractTrainerDecorator
DDPTrainerBackend = DDPTrainer
