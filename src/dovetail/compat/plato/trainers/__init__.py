"""plato's trainers, at the paths from which its users import them."""

from dovetail.compat.plato.trainers.basic import Trainer
from dovetail.compat.plato.trainers.composable import ComposableTrainer

__all__ = ["ComposableTrainer", "Trainer"]
