"""What a postprocessor is: a step that a client does and a server takes back.

An encoded update is an update like any other, whose `delta` holds other tensors under other names. So whatever carries
updates carries encoded ones, and their size is what is sent.
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

__all__ = ["EVERYONE", "Codec", "Gathering", "Postprocessor", "TensorCodec", "Upload"]

# The client of an update that is the mean of many, whose weight is that of all of them.
EVERYONE = 0


@dataclass(frozen=True)
class Upload:
    """What a postprocessor knows on the client.

    Attributes:
        task: The task that the update answers.
        seed: All randomness comes from it. It is another one for every postprocessor of a chain.
        state: What the postprocessor keeps for this client from round to round: tensors and plain values, read and
            replaced here.
    """

    task: Task
    seed: int
    state: dict[str, Any]

    def generator(self) -> torch.Generator:
        """Return a generator that begins at the seed."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Gathering:
    """What a postprocessor knows on the server.

    Attributes:
        round: The round, counted from 1.
        cohort: Who was asked, in the order of selection.
        weights: The global model that was sent.
        num_clients: How many could have been asked; 0 stands for the cohort itself.
        seed: All randomness comes from it. It is another one for every postprocessor of a chain.
    """

    round: int
    cohort: Sequence[int]
    weights: Weights
    num_clients: int = 0
    seed: int = 0

    @property
    def sample_rate(self) -> float:
        """The share of all clients that was asked."""
        return len(self.cohort) / self.num_clients if self.num_clients else 1.0

    def generator(self) -> torch.Generator:
        """Return a generator that begins at the seed."""
        return torch.Generator().manual_seed(self.seed)


class Postprocessor:
    """One step of the way of an update. Override what it does; every method does nothing by itself.

    A chain calls `encode` in its order on the client, and everything else in reverse on the server.

    Example:
        >>> class Halve(Postprocessor):
        ...     def encode(self, update, upload):
        ...         return update.with_delta({name: value / 2 for name, value in update.delta.items()})
        >>> update = Update(1, 1, 10, delta={"w": torch.tensor([4.0])})
        >>> Halve().encode(update, Upload(Task(1, 1, {}), seed=0, state={})).delta
        {'w': tensor([2.])}
    """

    # Whether `encode` leaves other tensors than those of the model, which only codecs can go on with.
    encodes: ClassVar[bool] = False
    # Whether the client must know who else was asked: the server then sends `cohort` in the task's config.
    needs_cohort: ClassVar[bool] = False
    # Whether what it promises is true only if the server makes nothing of updates but their mean.
    needs_plain_mean: bool = False

    def encode(self, update: Update, upload: Upload) -> Update:
        """Change an update on the client, after training."""
        return update

    def decode(self, update: Update, gathering: Gathering) -> Update:
        """Change an update on the server, when it has come.

        Raises:
            DataError: What has come cannot be read; the client is left out.
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
    """A postprocessor that writes tensors in another way, be it differences going up or weights going down."""

    encodes = True

    @abstractmethod
    def pack(self, weights: Weights, generator: torch.Generator) -> Weights:
        """Return the tensors to send."""

    @abstractmethod
    def unpack(self, packed: Weights) -> Weights:
        """Return what `pack` was given, or what is left of it."""

    def encode(self, update: Update, upload: Upload) -> Update:
        return update.with_delta(self.pack(update.delta, upload.generator()))

    def decode(self, update: Update, gathering: Gathering) -> Update:
        return update.with_delta(self.unpack(update.delta))


class TensorCodec(Codec):
    """A codec that writes every floating-point tensor by itself, as named parts; all others stay as they are.

    The part's name is appended to the tensor's after a slash, for tensors that stay too: so the last slash of a name
    always belongs to the codec that is to be undone next.

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
