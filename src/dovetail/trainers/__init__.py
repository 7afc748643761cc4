"""Trainers: the loop, the verbs, and the trainer that works alone."""

from dovetail.trainers.basic import SingleProcess, Trainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.lr_finder import LRFinder
from dovetail.trainers.metrics import accuracy
from dovetail.trainers.options import TrainerOptions
from dovetail.trainers.randomness import seed_everything
from dovetail.trainers.spellings import ProgressChecker

__all__ = [
    "LRFinder",
    "ProgressChecker",
    "SingleProcess",
    "Trainer",
    "TrainerOptions",
    "TrainingContext",
    "accuracy",
    "seed_everything",
]
