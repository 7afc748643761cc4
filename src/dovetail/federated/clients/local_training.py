"""Local training of a client: the schedule across rounds, and the number of updates and loss of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.trainers.context import TrainingContext


def continue_schedule(context: TrainingContext) -> None:
    """Set the settings by which the schedule of a round continues the schedule of the rounds before.

    Example:
        >>> context = TrainingContext()
        >>> context.config, context.client.round = {"epochs": 2, "rounds": 5}, 3
        >>> continue_schedule(context)
        >>> context.config
        {'epochs': 2, 'rounds': 5, 'epochs_before': 4, 'total_epochs': 10}
    """
    config, epochs = context.config, context.config.get("epochs", 1)
    if context.client.round > 0:
        config["epochs_before"] = (context.client.round - 1) * epochs
        config["total_epochs"] = epochs * config.get("rounds", 1)


def summarize_training(context: TrainingContext) -> tuple[int, float]:
    """Return the number of updates of the model that is sent, and the mean loss of its last epoch."""
    # The usual case needs no history of epochs.
    if len(context.run.phases) == 1:
        return context.progress.updates, context.history.get_latest_metric("train_loss")
    # A row before the first epoch, so that differences of counts need no special case.
    rows: list[Any] = [{"epoch": 0, "updates": 0, "loss": math.nan}]
    rows += [row for row in context.history.rows if row["stage"] == "train"]
    num_updates, loss, begin = 0, math.nan, 0
    for phase in context.run.phases:
        end = begin + phase.epochs
        if not phase.is_detached:
            # A strategy may have left out the rest of a phase.
            first, last = (max((row for row in rows if row["epoch"] <= at), key=_epoch_of) for at in (begin, end))
            num_updates, loss = num_updates + last["updates"] - first["updates"], last["loss"]
        begin = end
    return num_updates, loss


def _epoch_of(row: Mapping[str, Any]) -> int:
    return int(row["epoch"])
