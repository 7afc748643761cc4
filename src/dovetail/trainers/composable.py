"""plato's composable trainer under the name by which its users import it."""

from dovetail.compat.plato import ComposableTrainer

__all__ = ["ComposableTrainer"]
