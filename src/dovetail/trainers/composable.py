"""plato's composable trainer under the name by which its users import it."""

from dovetail.compat.plato.trainers.composable import ComposableTrainer

__all__ = ["ComposableTrainer"]
