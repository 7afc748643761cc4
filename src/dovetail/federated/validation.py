"""Which updates a server takes, and what it says of the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from torch.nn.utils import get_total_norm

from dovetail.federated.messages import Fault, Update, Weights

__all__ = ["MAX_SAMPLES", "admit", "check_update"]

# Nobody has more. An update that counts more than all others together is a mistake or an attack.
MAX_SAMPLES = 10**12


def admit(
    updates: Iterable[Update], expected: Collection[int], current_round: int, *, max_staleness: int = 0
) -> tuple[list[Update], list[Fault]]:
    """Sort out whose reports count, without a look at what they hold.

    Args:
        updates: What has come, in the order in which it did.
        expected: The ids of the clients that were asked.
        current_round: The round that is being gathered.
        max_staleness: How many rounds old the task of an update may be.

    Returns:
        The first report of every client that was asked and is not late, in the order given; a fault for every other.

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
            reason = f"{who} reported in round {current_round}, but was not asked"
            faults.append(Fault(update.client_id, update.round, "duplicate", reason))
        else:
            accepted[update.client_id] = update
    return list(accepted.values()), faults


def check_update(update: Update, weights: Weights) -> Fault | None:
    """Return why an update cannot be added to weights, or None if it can.

    Args:
        update: A decoded update.
        weights: The weights that were sent.

    Example:
        >>> import torch
        >>> weights = {"w": torch.zeros(2)}
        >>> check_update(Update(1, 1, 10, delta={"w": torch.ones(2)}), weights)
        >>> check_update(Update(1, 1, 10, delta={"w": torch.tensor([1.0, torch.nan])}), weights).reason
        "client 1: 'w' is not finite"
    """
    problem = _misfit(update, weights)
    if problem:
        return Fault(update.client_id, update.round, "wrong shape", f"client {update.client_id}: {problem}")
    problem = _not_finite(update.delta)
    if problem:
        return Fault(update.client_id, update.round, "not finite", f"client {update.client_id}: {problem}")
    return None


def _misfit(update: Update, weights: Weights) -> str | None:
    count = update.num_samples
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_SAMPLES:
        return f"num_samples: expected a whole number from 0 to {MAX_SAMPLES:.0e}, got {count!r}"
    delta = update.delta
    if delta.keys() != weights.keys():
        missing, extra = weights.keys() - delta.keys(), delta.keys() - weights.keys()
        return f"{min(missing)!r} is missing" if missing else f"{min(extra)!r} was not asked for"
    for name, value in delta.items():
        expected = weights[name]
        if value.shape != expected.shape:
            return f"{name!r}: expected the shape {list(expected.shape)}, got {list(value.shape)}"
        # A mean of whole numbers, as masks give it, is not whole.
        if value.dtype != expected.dtype and not (value.is_floating_point() and not expected.is_floating_point()):
            return f"{name!r}: expected {expected.dtype}, got {value.dtype}"
    return None


def _not_finite(delta: Weights) -> str | None:
    real = [value for value in delta.values() if value.is_floating_point() or value.is_complex()]
    # One pass over all tensors: whatever is not finite makes the norm so.
    if math.isfinite(float(get_total_norm(real))):
        return None
    # The norm of large numbers can be infinite too.
    return next((f"{name!r} is not finite" for name, value in delta.items() if not bool(value.isfinite().all())), None)
