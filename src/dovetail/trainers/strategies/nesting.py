"""What concrete strategies share: how they show their settings, and how one that holds others passes things on."""

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
    """A dataclass that shows, in one line, the settings that are not its defaults.

    Example:
        >>> from dovetail.trainers.strategies import SGDOptimizerStrategy
        >>> SGDOptimizerStrategy(lr=0.1, momentum=0.9)
        SGDOptimizerStrategy(lr=0.1, momentum=0.9)
    """

    def __repr__(self) -> str:
        own = fields(self)  # type: ignore[arg-type]  # whoever mixes this in is a dataclass
        settings = [
            f"{field.name}={shown(value)}"
            for field in sorted(own, key=lambda field: field.kw_only is True)
            if field.init and not _is_default(value := getattr(self, field.name), field)
        ]
        return f"{type(self).__name__}({', '.join(settings)})"


class Nesting(Described, Strategy, ABC):
    """A strategy that holds others: setup, hooks, state and teardown reach every one of them."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[Strategy]:
        """The strategies inside, in the order in which they are called."""

    def setup(self, context: TrainingContext) -> None:
        """Set up every part; if one of them fails, those before it are torn down.

        Raises:
            ConfigError: A part is no strategy.
        """
        self.check_parts()
        with ExitStack() as done:
            for part in self.parts:
                part.setup(context)
                done.callback(part.teardown, context)
            done.pop_all()

    def check_parts(self) -> None:
        """Refuse a part that is no strategy, such as the bare loss or scheduler that a trainer would take."""
        for part in self.parts:
            if not isinstance(part, Strategy):
                raise ConfigError(f"{type(self).__name__}: expected strategies inside, got {part!r}")

    def teardown(self, context: TrainingContext) -> None:
        """Tear every part down, the last one first, whatever goes wrong with another."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.teardown, context)

    def on_prepare(self, context: TrainingContext) -> None:
        """Pass on."""
        for part in self.parts:
            part.on_prepare(context)

    def on_train_start(self, context: TrainingContext) -> None:
        """Pass on."""
        for part in self.parts:
            part.on_train_start(context)

    def on_train_end(self, context: TrainingContext) -> None:
        """Pass on."""
        for part in self.parts:
            part.on_train_end(context)

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Pass on."""
        for part in self.parts:
            part.on_epoch_start(context)

    def on_epoch_end(self, context: TrainingContext) -> None:
        """Pass on."""
        for part in self.parts:
            part.on_epoch_end(context)

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        """Pass on."""
        for part in self.parts:
            part.on_gradients(optimizer, context)

    def state_dict(self) -> dict[str, Any]:
        """Return the parts' states in their order, or nothing where none has one."""
        states = [part.state_dict() for part in self.parts]
        return {"parts": states} if any(states) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every part its state back.

        Raises:
            CheckpointError: The state is of another number of parts.
        """
        parts, states = self.parts, state.get("parts", ())
        if states and len(states) != len(parts):
            raise CheckpointError(f"{self!r} holds {len(parts)} strategies, and the checkpoint has {len(states)}")
        for part, part_state in zip(parts, states, strict=False):
            part.load_state_dict(part_state)


def _is_default(value: Any, field: Field[Any]) -> bool:
    if field.default is MISSING or isinstance(value, Tensor):
        return False
    return value is field.default or bool(type(value) is type(field.default) and value == field.default)


def shown(value: Any) -> str:
    """Return the shortest text that tells a user which value this is."""
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
