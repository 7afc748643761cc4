"""What an add-on is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.trainers.base import mount

if TYPE_CHECKING:
    from dovetail.trainers.trainer import Trainer

    Mounted = Trainer
else:
    Mounted = object


class AddOnBase(Mounted):
    """Base of add-ons: classes written against `super()` that `Trainer.add_on` mounts on a trainer class.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> class Shout(AddOnBase):
        ...     def after_step(self, output):
        ...         print("done!")
        ...         super().after_step(output)
        >>> issubclass(Trainer.add_on(Shout), Trainer)
        True
    """

    @classmethod
    def apply(cls, base: type[Any]) -> type[Any]:
        """Return `base` with this add-on mounted; override it for another way of mounting."""
        return mount(cls, base)
