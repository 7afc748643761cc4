"""Sparsification of updates: only the largest numbers are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.errors import DataError, expect
from dovetail.federated.messages import Update
from dovetail.federated.postprocess.base import TensorCodec, Upload


@dataclass(frozen=True)
class TopK(TensorCodec):
    """Sends the largest numbers of every tensor with their positions; all others count as 0.

    Args:
        ratio: The share of a tensor's numbers that is sent, at least one.
        error_feedback: Keep what was not sent in the client's state, and add it to the client's next update, so that
            nothing is lost for good (Stich et al., 2018).

    Example:
        >>> codec = TopK(ratio=0.5)
        >>> packed = codec.pack({"w": torch.tensor([[1.0, -5.0], [3.0, 0.5]])}, torch.Generator())
        >>> packed["w/values"], packed["w/indices"]
        (tensor([-5.,  3.]), tensor([1, 2], dtype=torch.int32))
        >>> codec.unpack(packed)
        {'w': tensor([[ 0., -5.],
                [ 3.,  0.]])}
    """

    ratio: float = 0.01
    error_feedback: bool = False

    def __post_init__(self) -> None:
        expect(0 < self.ratio <= 1, "ratio", "a number above 0 and at most 1", self.ratio)

    def encode(self, update: Update, upload: Upload) -> Update:
        """Pack the difference of the update; with error feedback, plus the rest of earlier ones."""
        if not self.error_feedback:
            return super().encode(update, upload)
        left = upload.state.get("left", {})
        wanted = {name: value + left[name] if name in left else value for name, value in update.delta.items()}
        packed = self.pack(wanted, upload.generator())
        sent = self.unpack(packed)
        # The part of the update that the server does not receive.
        upload.state["left"] = {name: value - sent[name] for name, value in wanted.items() if value.is_floating_point()}
        return update.with_delta(packed)

    def split(self, tensor: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the largest numbers of a tensor in the order of their positions, and the positions."""
        flat = tensor.flatten()
        indices = flat.abs().topk(self._num_kept(flat.numel()), sorted=False).indices.sort().values
        shape = torch.tensor(tensor.shape, dtype=torch.int64)
        return {"values": flat[indices], "indices": indices.to(torch.int32), "shape": shape}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        values, shape = parts["values"], parts["shape"].tolist()
        # Reject a small message that claims a huge tensor (memory exhaustion).
        if len(values) != self._num_kept(math.prod(shape)):
            raise DataError(f"{len(values)} values are not the share of {self.ratio} of a tensor of {shape}")
        flat = values.new_zeros(math.prod(shape))
        flat[parts["indices"].long()] = values
        return flat.reshape(shape)

    def _num_kept(self, num_elements: int) -> int:
        return max(1, math.ceil(self.ratio * num_elements))
