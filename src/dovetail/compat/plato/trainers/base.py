"""The abstract trainer, at plato's path."""

from dovetail.trainers.base import Trainer as Trainer
