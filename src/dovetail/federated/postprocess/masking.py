"""Pairwise masks: the server sees the sum of updates, and no single one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dovetail.errors import ConfigError, DataError, expect
from dovetail.federated.messages import Update, Weights
from dovetail.federated.postprocess.base import EVERYONE, Gathering, Postprocessor, Upload
from dovetail.runtime.seeds import derive_seed

_DTYPES = {32: torch.int32, 64: torch.int64}


@dataclass(frozen=True)
class PairwiseMasks(Postprocessor):
    """Hides every update behind random numbers that cancel in the sum, as in secure aggregation.

    Every pair of the round's clients shares a mask, which one adds and the other subtracts. Numbers are whole
    multiples of 2**-fraction_bits modulo 2**bits, so masks cancel bit for bit. If clients drop out, the server removes
    their masks from the sum. The result is one update of client 0: the weighted mean of all. This simulates the
    arithmetic; no keys are exchanged.

    Args:
        seed: The secret of the clients, which the server must not know; in a simulation it does.
        bits: The bits of a number: 64, or 32 for half the bytes and a smaller range.
        fraction_bits: The bits of its fraction. None means half of them.

    Example:
        >>> from dovetail.federated.messages import Task
        >>> masks, weights = PairwiseMasks(), {"w": torch.zeros(2)}
        >>> sent = [
        ...     masks.encode(
        ...         Update(k, 1, num_samples=k, delta={"w": torch.tensor([float(k), 0.5])}),
        ...         Upload(Task(1, k, weights, config={"cohort": [1, 2, 3]}), seed=0, state={}),
        ...     )
        ...     for k in (1, 3)  # the second client drops out
        ... ]
        >>> mean, = masks.combine(sent, Gathering(1, [1, 2, 3], weights))
        >>> mean.delta, mean.num_samples
        ({'w': tensor([2.5000, 0.5000])}, 4)
    """

    seed: int = 0
    bits: Literal[32, 64] = 64
    fraction_bits: int | None = None

    encodes = True
    needs_cohort = True

    def __post_init__(self) -> None:
        expect(self.bits in _DTYPES, "bits", "32 or 64", self.bits)
        expect(0 <= self._fraction_bits < self.bits, "fraction_bits", f"0 to {self.bits - 1}", self.fraction_bits)

    def encode(self, update: Update, upload: Upload) -> Update:
        """Convert the update times its weight to whole numbers, and add the masks."""
        task = upload.task
        cohort = task.config.get("cohort", ())
        if update.client_id not in cohort:
            raise ConfigError(f"pairwise masks: client {update.client_id} is not among the round's clients {cohort}")
        if update.payload:
            raise ConfigError(
                f"pairwise masks hide weights only, but the algorithm sends {', '.join(update.payload)} too"
            )
        _check_names(update.delta, task.weights)
        # Sorted names, so that all clients have the same number at the same position.
        flat = torch.cat([update.delta[name].flatten().double() for name in sorted(update.delta)])
        exact = torch.round(flat * (update.num_samples * 2.0**self._fraction_bits))
        # The sum of the whole cohort must not overflow, because the server could not notice it.
        limit = 2.0 ** (self.bits - 1) / len(cohort)
        if not bool((exact.abs() < limit).all()):
            raise DataError(
                f"client {update.client_id}: its update times {update.num_samples} samples is not finite or beyond the "
                f"±{limit / 2.0**self._fraction_bits:g} that {self.bits} bits leave to each of {len(cohort)} clients"
            )
        masked = exact.to(_DTYPES[self.bits])
        for other in cohort:
            masked += self._mask(update.round, update.client_id, other, len(masked))
        return update.with_delta({"masked": masked})

    def decode(self, update: Update, gathering: Gathering) -> Update:
        """Reject an update that cannot be added to the others."""
        masked = update.delta["masked"]
        total = sum(value.numel() for value in gathering.weights.values())
        if len(update.delta) != 1 or masked.shape != (total,) or masked.dtype != _DTYPES[self.bits]:
            raise DataError(
                f"expected {total} masked numbers of {self.bits} bits, got {list(masked.shape)} {masked.dtype}"
            )
        if update.round != gathering.round or update.client_id not in gathering.cohort:
            raise DataError(f"its masks do not belong to round {gathering.round}")
        return update

    def combine(self, updates: Sequence[Update], gathering: Gathering) -> list[Update]:
        if not updates:
            return []
        there = {update.client_id for update in updates}
        total = torch.stack([update.delta["masked"] for update in updates]).sum(dim=0, dtype=_DTYPES[self.bits])
        # A client that dropped out cannot cancel its half of a mask, so the server subtracts the other halves.
        for gone in set(gathering.cohort) - there:
            for survivor in there:
                total -= self._mask(gathering.round, survivor, gone, len(total))
        weight = sum(update.num_samples for update in updates)
        flat = total.double() / (2.0**self._fraction_bits * max(weight, 1))
        delta = _unflattened(flat, gathering.weights)
        # The result is the mean over all clients, so a metric that not all of them report is left out.
        names = set.intersection(*(set(update.metrics) for update in updates))
        metrics = {
            name: sum(update.metrics[name] * update.num_samples for update in updates) / max(weight, 1)
            for name in sorted(names)
        }
        return [
            replace(updates[0], client_id=EVERYONE, num_samples=weight, num_updates=0, delta=delta, metrics=metrics)
        ]

    @property
    def _fraction_bits(self) -> int:
        return self.bits // 2 if self.fraction_bits is None else self.fraction_bits

    def _mask(self, current_round: int, own: int, other: int, length: int) -> Tensor:
        """Return the mask that a client adds for another one, which adds its negative."""
        mask = torch.zeros(length, dtype=_DTYPES[self.bits])
        if own == other:
            return mask
        seed = derive_seed(self.seed, current_round, min(own, other), max(own, other))
        mask.random_(-(2 ** (self.bits - 1)), None, generator=torch.Generator().manual_seed(seed))
        # In two's complement, the sum of both is 0 also after an overflow.
        return mask if own < other else -mask


def _check_names(delta: Weights, weights: Weights) -> None:
    shapes = [{name: value.shape for name, value in each.items()} for each in (delta, weights)]
    if shapes[0] != shapes[1]:
        raise DataError("pairwise masks need an update with the tensors that were sent, no more and no others")


def _unflattened(flat: Tensor, weights: Weights) -> dict[str, Tensor]:
    names = sorted(weights)
    pieces = dict(zip(names, torch.split_with_sizes(flat, [weights[name].numel() for name in names]), strict=True))
    return {
        # The mean of whole numbers is not whole.
        name: pieces[name].reshape(value.shape).to(value.dtype if value.is_floating_point() else torch.float64)
        for name, value in weights.items()
    }
