"""Protocol of streams: three methods besides iteration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from dovetail.errors import DataError

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Stream(Protocol[T_co]):
    """Samples of one epoch that can be divided and continued at any sample.

    A trainer divides a stream among its processes and their data workers, stores the state of every part in each
    checkpoint, and divides what is left if another number of processes or workers continues. For this, four rules hold:

    1. Iteration yields what is left, and `state_dict` counts exactly the samples that were yielded.
    2. `split` divides what is left: the parts together yield each sample once. The parts are new objects; reading one
       of them changes neither the others nor this object.
    3. The state describes the part as well as the position: any object of the stream that loads the state of a part
       becomes this part.
    4. All processes create the same stream.

    A stream whose order depends on the epoch also has a method `set_epoch(epoch)`, which the trainer calls before it
    divides the stream.

    Example:
        >>> class Squares:
        ...     def __init__(self, stop, following=0, step=1):
        ...         self.stop, self.following, self.step = stop, following, step
        ...
        ...     def __iter__(self):
        ...         while self.following < self.stop:
        ...             number, self.following = self.following, self.following + self.step
        ...             yield number**2
        ...
        ...     def split(self, rank, world):
        ...         return Squares(self.stop, self.following + rank * self.step, self.step * world)
        ...
        ...     def state_dict(self):
        ...         return {"following": self.following, "step": self.step}
        ...
        ...     def load_state_dict(self, state):
        ...         self.following, self.step = state["following"], state["step"]
        >>> list(Squares(7).split(1, 3))
        [1, 16]
    """

    def __iter__(self) -> Iterator[T_co]:
        """Yield what is left of the epoch."""

    def split(self, rank: int, world: int) -> Stream[T_co]:
        """Return part `rank` of `world` parts of what is left."""

    def state_dict(self) -> dict[str, Any]:
        """Return this part and its position, as JSON values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the part, at the position, that `state_dict` described."""


class UnsuitableStreamError(DataError):
    """A dataset of a known library whose epochs do not have each sample once."""
