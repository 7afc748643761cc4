"""Base classes of postprocessors, which encode updates on a client and decode them on the server.

An encoded update is an `Update` whose `delta` has other tensors under other names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.errors import DataError
from dovetail.federated.messages import Task, Update, Weights

# The client id of an update that is the mean of many, with the sum of their weights.
EVERYONE = 0


@dataclass(frozen=True)
class Upload:
    """The input of a postprocessor on the client.

    Attributes:
        task: The task of the client.
        seed: The seed of all random numbers, different for every postprocessor of a chain.
        state: The state of the postprocessor for this client: tensors and plain values, to be read and replaced.
    """

    task: Task
    seed: int
    state: dict[str, Any]

    def generator(self) -> torch.Generator:
        """Return a generator with the seed."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Gathering:
    """The input of a postprocessor on the server.

    Attributes:
        round: The round, counted from 1.
        cohort: The selected clients, in the order of selection.
        weights: The global model that was sent.
        num_clients: The number of clients that could be selected; 0 means the cohort.
        seed: The seed of all random numbers, different for every postprocessor of a chain.
    """

    round: int
    cohort: Sequence[int]
    weights: Weights
    num_clients: int = 0
    seed: int = 0

    @property
    def sample_rate(self) -> float:
        """The share of all clients that was selected."""
        return len(self.cohort) / self.num_clients if self.num_clients else 1.0

    def generator(self) -> torch.Generator:
        """Return a generator with the seed."""
        return torch.Generator().manual_seed(self.seed)


class Postprocessor:
    """Base of postprocessors. Every method does nothing; override those that you need.

    A chain calls `encode` in its order on the client, and all other methods in reverse order on the server.

    Example:
        >>> class Halve(Postprocessor):
        ...     def encode(self, update, upload):
        ...         return update.with_delta({name: value / 2 for name, value in update.delta.items()})
        >>> update = Update(1, 1, 10, delta={"w": torch.tensor([4.0])})
        >>> Halve().encode(update, Upload(Task(1, 1, {}), seed=0, state={})).delta
        {'w': tensor([2.])}
    """

    # True if `encode` returns other tensors than the model has, which only codecs can process.
    encodes: ClassVar[bool] = False
    # True if the client needs the ids of the round's clients: the server then sends `cohort` in the task's config.
    needs_cohort: ClassVar[bool] = False
    # True if its guarantee holds only when the server uses nothing except the mean of updates.
    needs_plain_mean: bool = False

    def encode(self, update: Update, upload: Upload) -> Update:
        """Change an update on the client, after training."""
        return update

    def decode(self, update: Update, gathering: Gathering) -> Update:
        """Change an update on the server, after it is received.

        Raises:
            DataError: The update cannot be decoded; the client is left out.
        """
        return update

    def combine(self, updates: Sequence[Update], gathering: Gathering) -> Sequence[Update]:
        """Change all updates of a round together, after each was decoded."""
        return updates

    def aggregated(self, mean: Weights, updates: Sequence[Update], gathering: Gathering) -> Weights:
        """Change the mean of the updates, once per round."""
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of the server must keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


class Codec(Postprocessor, ABC):
    """A postprocessor that encodes tensors: the differences of updates, or the weights that clients receive."""

    encodes = True

    @abstractmethod
    def pack(self, weights: Weights, generator: torch.Generator) -> Weights:
        """Return the tensors to send."""

    @abstractmethod
    def unpack(self, packed: Weights) -> Weights:
        """Return the tensors that `pack` received, or their approximation."""

    def encode(self, update: Update, upload: Upload) -> Update:
        return update.with_delta(self.pack(update.delta, upload.generator()))

    def decode(self, update: Update, gathering: Gathering) -> Update:
        return update.with_delta(self.unpack(update.delta))


class TensorCodec(Codec):
    """A codec that encodes every floating-point tensor as named parts; other tensors do not change.

    The name of a part is appended to the name of its tensor after a slash, also for tensors that do not change. So the
    last slash of a name always belongs to the codec that is decoded next.

    Example:
        >>> class InFloat16(TensorCodec):
        ...     def split(self, tensor, generator):
        ...         return {"half": tensor.half()}
        ...     def join(self, parts):
        ...         return parts["half"].float()
        >>> packed = InFloat16().pack({"w": torch.ones(1), "steps": torch.tensor(3)}, torch.Generator())
        >>> packed
        {'w/half': tensor([1.], dtype=torch.float16), 'steps/same': tensor(3)}
        >>> InFloat16().unpack(packed)
        {'w': tensor([1.]), 'steps': tensor(3)}
    """

    @abstractmethod
    def split(self, tensor: Tensor, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Return the parts of a floating-point tensor that has elements."""

    @abstractmethod
    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor of these parts."""

    def pack(self, weights: Weights, generator: torch.Generator) -> dict[str, Tensor]:
        packed: dict[str, Tensor] = {}
        for name, value in weights.items():
            has_parts = value.is_floating_point() and value.numel() > 0
            # Also unchanged tensors get a suffix; otherwise a name of the model with a slash would be cut in
            # `unpack`.
            parts = self.split(value, generator) if has_parts else {_SAME: value}
            packed.update({f"{name}/{part}": each for part, each in parts.items()})
        return packed

    def unpack(self, packed: Weights) -> dict[str, Tensor]:
        tensors: dict[str, dict[str, Tensor]] = {}
        for key, value in packed.items():
            name, slash, part = key.rpartition("/")
            if not slash:
                raise DataError(f"{key!r} was not written by {type(self).__name__}")
            tensors.setdefault(name, {})[part] = value
        return {name: parts[_SAME] if _SAME in parts else self.join(parts) for name, parts in tensors.items()}


_SAME = "same"
