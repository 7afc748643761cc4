"""Validation of updates: which ones a server accepts, and the faults of the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from torch import Tensor
from torch.nn.utils import get_total_norm

from dovetail.federated.messages import Fault, Update, Weights

__all__ = ["MAX_SAMPLES", "admit", "check_sent", "check_update"]

# An update with more samples is a mistake or an attack, because it would outweigh all others.
MAX_SAMPLES = 10**12


def admit(
    updates: Iterable[Update], expected: Collection[int], current_round: int, *, max_staleness: int = 0
) -> tuple[list[Update], list[Fault]]:
    """Return the first report of every client that was asked and is not late, and a fault for every other report.

    Args:
        updates: The reports, in the order of their arrival; their content is not checked.
        expected: The ids of the clients that were asked.
        current_round: The current round.
        max_staleness: The number of rounds that the task of an update may be old.

    Example:
        >>> updates = [Update(1, 3, 10), Update(2, 2, 10), Update(1, 3, 10)]
        >>> accepted, faults = admit(updates, expected=[1, 2], current_round=3)
        >>> [update.client_id for update in accepted], [(fault.client_id, fault.kind) for fault in faults]
        ([1], [(2, 'late'), (1, 'duplicate')])
    """
    accepted: dict[int, Update] = {}
    faults = []
    wanted = frozenset(expected)
    for update in updates:
        who = f"client {update.client_id}"
        if not current_round - max_staleness <= update.round <= current_round:
            reason = f"{who} reported for round {update.round} in round {current_round}"
            faults.append(Fault(update.client_id, update.round, "late", reason))
        elif update.client_id in accepted:
            reason = f"{who} reported twice in round {current_round}"
            faults.append(Fault(update.client_id, update.round, "duplicate", reason))
        elif update.client_id not in wanted:
            reason = f"{who} reported in round {current_round}, but was not selected"
            faults.append(Fault(update.client_id, update.round, "duplicate", reason))
        else:
            accepted[update.client_id] = update
    return list(accepted.values()), faults


def check_update(update: Update, weights: Weights) -> Fault | None:
    """Return why a decoded update cannot be added to the weights that were sent. None means that it can.

    Example:
        >>> import torch
        >>> weights = {"w": torch.zeros(2)}
        >>> check_update(Update(1, 1, 10, delta={"w": torch.ones(2)}), weights)
        >>> check_update(Update(1, 1, 10, delta={"w": torch.tensor([1.0, torch.nan])}), weights).reason
        "client 1: 'w' is not finite"
    """
    for name in ("num_samples", "num_updates"):
        count = getattr(update, name)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_SAMPLES:
            problem = f"{name}: expected a whole number from 0 to {MAX_SAMPLES:.0e}, got {count!r}"
            return _fault(update, "wrong shape", problem)
    return check_sent(update, update.delta, weights)


def check_sent(update: Update, found: Any, expected: Weights, what: str = "") -> Fault | None:
    """Return why tensors of an update cannot be added to others. None means that they can.

    Args:
        update: The update.
        found: The tensors, by name, if they are valid.
        expected: Tensors with the names, shapes and types that are accepted.
        what: The name of these tensors in messages; empty for the update's difference.

    Example:
        >>> import torch
        >>> check_sent(Update(1, 1, 10), {}, {"w": torch.zeros(2)}, "control").reason
        "client 1: control: 'w' is missing"
    """
    intro = f"{what}: " if what else ""
    # Types and shapes first: the check of values needs tensors.
    problem = _find_mismatch(found, expected)
    if problem:
        return _fault(update, "wrong shape", intro + problem)
    problem = _not_finite(found)
    return _fault(update, "not finite", intro + problem) if problem else None


def _fault(update: Update, kind: Literal["wrong shape", "not finite"], problem: str) -> Fault:
    return Fault(update.client_id, update.round, kind, f"client {update.client_id}: {problem}")


def _find_mismatch(found: Any, expected: Weights) -> str | None:
    if not isinstance(found, Mapping):
        return f"expected tensors by their names, got {type(found).__name__}"
    if found.keys() != expected.keys():
        missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
        return f"{min(missing)!r} is missing" if missing else f"{min(extra, key=str)!r} was not requested"
    for name, value in found.items():
        like = expected[name]
        if not isinstance(value, Tensor):
            return f"{name!r}: expected a tensor, got {type(value).__name__}"
        if value.shape != like.shape:
            return f"{name!r}: expected the shape {list(like.shape)}, got {list(value.shape)}"
        # Masks turn whole numbers into their mean, which is not whole.
        if value.dtype != like.dtype and not (value.is_floating_point() and not like.is_floating_point()):
            return f"{name!r}: expected {like.dtype}, got {value.dtype}"
    return None


def _not_finite(delta: Weights) -> str | None:
    real = [value for value in delta.values() if value.is_floating_point() or value.is_complex()]
    # One pass over all tensors: a value that is not finite makes the norm not finite.
    if math.isfinite(float(get_total_norm(real))):
        return None
    # The norm of large finite numbers can be infinite, too.
    return next((f"{name!r} is not finite" for name, value in delta.items() if not bool(value.isfinite().all())), None)
