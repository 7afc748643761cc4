"""Frozen base of a model: checkpoints without the tensors that training does not change."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.distributed import whole
from dovetail.errors import CheckpointError

# The section of a checkpoint that describes the tensors which it leaves out.
SECTION = "frozen_base"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are summed at once, so that the copy as 64-bit integers stays small.
_CHUNK = 1 << 20


class FrozenBase:
    """The tensors of a model that do not train, and that a checkpoint therefore does not need.

    The base has every frozen parameter and every buffer. A tensor leaves it when it trains or when its bits change,
    such as the statistics of a batch norm or a teacher that follows its student. All methods are collective calls if
    several processes hold parts of the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        >>> _ = model[0].requires_grad_(False)
        >>> base = FrozenBase()
        >>> base.note(model)
        >>> _ = model(torch.randn(5, 3))
        >>> list(base.without({"model": model.state_dict()}, model)["model"])
        ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        # The SHA-256 and the fast checksum of every tensor, by its name.
        self._digests: dict[str, tuple[str, int]] = {}

    def note(self, model: nn.Module, *, again: bool = False) -> None:
        """Record the tensors of a model that do not train; again only for another model, or if `again` is set."""
        if not again and self._model is not None and self._model() is model:
            return
        self._digests = {}
        for name, tensor in _frozen(model).items():
            joined = whole(tensor)
            self._digests[name] = _digest(joined), _checksum(joined)
        self._model = weakref.ref(model)

    def without(self, state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """Return a state of a trainer without the base, and with the SHA-256 of the base."""
        self.note(model)
        present = _frozen(model)
        self._digests = {
            name: digest
            for name, digest in self._digests.items()
            if name in present and _checksum(whole(present[name])) == digest[1]
        }
        trained = {name: value for name, value in state["model"].items() if name not in self._digests}
        digests = {name: digest for name, (digest, _) in self._digests.items()}
        return {**state, "model": trained, SECTION: {"sha256": _total(digests), "tensors": len(digests)}}

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to a copy of the model, and records its tensors itself.
        return vars(FrozenBase())


def with_base(state: Mapping[str, Any], model: nn.Module | None) -> Mapping[str, Any]:
    """Return a state of a checkpoint whose weights are complete: those that it leaves out are the model's own.

    Raises:
        CheckpointError: The checkpoint leaves out a base, and the model has another one.
    """
    if SECTION not in state:
        return state
    match state[SECTION]:
        case {"sha256": str(expected), "tensors": int(number)}:
            saved = state["model"]
        case other:
            raise CheckpointError(f"{SECTION}: expected a SHA-256 and a number of tensors, got {other!r}")
    if model is None:
        raise CheckpointError(
            f"the checkpoint holds only what was trained, without the {number} tensors of its frozen base; load it "
            "with a trainer that has the base"
        )
    present = model.state_dict()
    left_out = {name: value for name, value in present.items() if name not in saved and isinstance(value, Tensor)}
    found = _total({name: _digest(whole(value)) for name, value in left_out.items()})
    if found != expected:
        raise CheckpointError(
            f"the checkpoint holds only what was trained, on a frozen base of {number} tensors with the SHA-256 "
            f"{expected[:16]}…, but the model has {len(left_out)} others with {found[:16]}…; give the trainer a model "
            "with the same base weights"
        )
    return {**state, "model": {**left_out, **saved}}


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    tensors = model.state_dict(keep_vars=True).items()
    return {name: it.detach() for name, it in tensors if isinstance(it, Tensor) and not it.requires_grad}


def _digest(tensor: Tensor) -> str:
    """Return the SHA-256 over dtype, shape and bytes."""
    digest = sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    for chunk in _chunks(tensor):
        digest.update(chunk.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _total(digests: Mapping[str, str]) -> str:
    lines = (f"{name}\0{digest}\n" for name, digest in sorted(digests.items()))
    return sha256("".join(lines).encode()).hexdigest()


def _checksum(tensor: Tensor) -> int:
    """Return a number that changes with any realistic change of the bits; it is computed on the tensor's device."""
    total = 0
    for chunk in _chunks(tensor):
        bits = chunk.view(_INTEGERS[chunk.element_size()]).long()
        # The position counts, so that a new order of the same values is a change.
        weights = torch.arange(1, 2 * len(bits), 2, device=bits.device)
        total = (total * 1_000_003 + int((bits * weights).sum())) % 2**64
    return total


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK]
