"""plato's names, at the paths from which its users import them: `plato.X` is `dovetail.compat.plato.X`."""

from dovetail.compat.plato.trainers import ComposableTrainer, Trainer

__all__ = ["ComposableTrainer", "Trainer"]
