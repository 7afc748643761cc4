"""plato's trainer under the name by which its users import it."""

from dovetail.compat.plato.trainers.basic import Trainer

__all__ = ["Trainer"]
