"""Shared bases of strategies: a `repr` of their settings, and a strategy that contains other strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from dovetail.errors import CheckpointError, ConfigError
from dovetail.trainers.strategies.base import Strategy

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class Described:
    """Mixin for dataclasses whose `repr` shows, in one line, the settings that are not the defaults.

    Example:
        >>> from dovetail.trainers.strategies import SGDOptimizerStrategy
        >>> SGDOptimizerStrategy(lr=0.1, momentum=0.9)
        SGDOptimizerStrategy(lr=0.1, momentum=0.9)
    """

    def __repr__(self) -> str:
        own = fields(self)  # type: ignore[arg-type]  # every class with this mixin is a dataclass
        settings = [
            f"{field.name}={shown(value)}"
            # Keyword-only fields of a base class come first in `fields`, but are written last in a call.
            for field in sorted(own, key=lambda field: field.kw_only is True)
            if field.init and not _is_default(value := getattr(self, field.name), field)
        ]
        return f"{type(self).__name__}({', '.join(settings)})"


class Nesting(Described, Strategy, ABC):
    """A strategy that contains others; setup, hooks, state and teardown are forwarded to all of them."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[Strategy]:
        """The strategies inside, in the order in which they are called."""

    def setup(self, context: TrainingContext) -> None:
        """Set up every part; if one of them fails, the earlier ones are torn down.

        Raises:
            ConfigError: A part is not a strategy.
        """
        self.check_parts()
        with ExitStack() as done:
            for part in self.parts:
                part.setup(context)
                done.callback(part.teardown, context)
            done.pop_all()

    def check_parts(self) -> None:
        """Raise if a part is not a strategy, such as a bare loss or scheduler, which only a trainer accepts."""
        for part in self.parts:
            if not isinstance(part, Strategy):
                raise ConfigError(f"{type(self).__name__}: expected strategies inside, got {part!r}")

    def teardown(self, context: TrainingContext) -> None:
        """Tear down every part, the last one first, even if one of them fails."""
        # An ExitStack calls all of them, and raises the error of the last one that failed.
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.teardown, context)

    def on_prepare(self, context: TrainingContext) -> None:
        """Call `on_prepare` of every part."""
        for part in self.parts:
            part.on_prepare(context)

    def on_train_start(self, context: TrainingContext) -> None:
        """Call `on_train_start` of every part."""
        for part in self.parts:
            part.on_train_start(context)

    def on_train_end(self, context: TrainingContext) -> None:
        """Call `on_train_end` of every part."""
        for part in self.parts:
            part.on_train_end(context)

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Call `on_epoch_start` of every part."""
        for part in self.parts:
            part.on_epoch_start(context)

    def on_epoch_end(self, context: TrainingContext) -> None:
        """Call `on_epoch_end` of every part."""
        for part in self.parts:
            part.on_epoch_end(context)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Call `on_gradients` of every part."""
        for part in self.parts:
            part.on_gradients(optimizer, context)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts in order; empty if no part has a state."""
        states = [part.state_dict() for part in self.parts]
        return {"parts": states} if any(states) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every part.

        Raises:
            CheckpointError: The state has another number of parts.
        """
        parts, states = self.parts, state.get("parts", ())
        # Without states, no part had one when the checkpoint was written.
        if states and len(states) != len(parts):
            raise CheckpointError(f"{self!r} holds {len(parts)} strategies, and the checkpoint has {len(states)}")
        for part, part_state in zip(parts, states, strict=False):
            part.load_state_dict(part_state)


def _is_default(value: Any, field: Field[Any]) -> bool:
    # Comparing tensors returns a tensor.
    if field.default is MISSING or isinstance(value, Tensor):
        return False
    # With the type, because 1 == 1.0 == True.
    return value is field.default or bool(type(value) is type(field.default) and value == field.default)


def shown(value: Any) -> str:
    """Return the shortest text that identifies a value for the user."""
    if isinstance(value, partial):
        arguments = [*map(shown, value.args), *(f"{name}={shown(it)}" for name, it in value.keywords.items())]
        return f"partial({', '.join([shown(value.func), *arguments])})"
    if isinstance(value, Tensor):
        return f"Tensor{tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return f"{opening}{', '.join(map(shown, value))}{closing}"
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else repr(value)
