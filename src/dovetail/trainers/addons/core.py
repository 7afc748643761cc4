"""Base class of add-ons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.trainers.base import mount

if TYPE_CHECKING:
    from dovetail.trainers.trainer import Trainer

    Mounted = Trainer
else:
    # At run time an add-on has no trainer as a base, so that `mount` can put it in front of any trainer class.
    Mounted = object


class AddOnBase(Mounted):
    """Base of add-ons: classes written against `super()` that `Trainer.add_on` mixes into a trainer class.

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
        """Return `base` with this add-on mixed in; override it to combine the classes in another way."""
        return mount(cls, base)
