"""Base class of capabilities: verbs written against `super()`, for a trainer object or for a trainer class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.errors import ConfigError
from dovetail.trainers.base import Trainer
from dovetail.trainers.preserve_state import layers

if TYPE_CHECKING:
    from dovetail.trainers.decorators import TrainerDecorator

    Mounted = TrainerDecorator
else:
    # At run time a capability has no trainer as a base, so that it can be mounted on a decorator or on any trainer.
    Mounted = object


class Capability(Mounted):
    """Base of capabilities: classes that extend the verbs of a trainer.

    Combined with `TrainerDecorator`, a capability decorates a trainer object; given to `Trainer.add_on`, it extends a
    trainer class. It declares its own attributes in the class body. Its constructor takes its own keywords, sets its
    own attributes, and forwards the rest:

        class Loud(Capability):
            kind = "loudness"
            word: str

            def __init__(self, *args, word="done", **kwargs):
                self.word = word
                super().__init__(*args, **kwargs)

            def after_step(self, output):
                print(self.word)
                super().after_step(output)

    Attributes:
        kind: The kind of feature. A trainer has at most one capability of each kind.
        conflicts: Kinds with which it cannot be combined, and the reasons.
    """

    kind: ClassVar[str]
    conflicts: ClassVar[Mapping[str, str]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # After the constructor, when the layers inside are known.
        _check(self)


def capabilities_of(trainer: Trainer) -> list[type[Capability]]:
    """Return the capability classes of a trainer and of the trainers it decorates, the outermost first."""
    return [capability for _, capability in _named(trainer)]


def _named(trainer: Trainer) -> list[tuple[str, type[Capability]]]:
    """Return the capabilities, each with the name that the user knows: of the layer, or of the add-on."""
    return [
        # Only a decorator has an attribute `trainer`.
        (type(layer).__name__ if "trainer" in vars(layer) else _add_on(layer, cls), cls)
        for layer in layers(trainer)
        for cls in type(layer).__mro__
        if "kind" in vars(cls)
    ]


def _add_on(trainer: Trainer, capability: type[Capability]) -> str:
    derived = (cls for cls in type(trainer).__mro__ if issubclass(cls, capability) and not issubclass(cls, Trainer))
    return next(derived, capability).__name__


def _check(trainer: Trainer) -> None:
    """Raise if two capabilities of a trainer have the same kind or exclude each other."""
    found = _named(trainer)
    for number, (outer_name, outer) in enumerate(found):
        for inner_name, inner in found[number + 1 :]:
            names = f"{outer_name} and {inner_name}"
            if outer.kind == inner.kind:
                raise ConfigError(f"{names} cannot be combined: the trainer has {inner.kind} already")
            reason = outer.conflicts.get(inner.kind) or inner.conflicts.get(outer.kind)
            if reason is not None:
                raise ConfigError(f"{names} cannot be combined: {reason}")
