"""Plan of a `fit`: its length, periods and phases, from arguments and options."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Set
from typing import Any

from dovetail.errors import ConfigError
from dovetail.trainers.context import Plan, TrainingContext
from dovetail.trainers.options import TrainerOptions
from dovetail.trainers.saving import RETENTION, Saver
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.units import Batches, Epochs, TrainUnit, parse_unit

# Options that describe how checkpoints are written, but do not request them.
_SAVING_DETAILS = {"save_in_background", "on_save_error"}

# Options that request checkpoints if they are given.
_SAVING_REQUESTS = {"checkpoint_dir", "checkpoint_name", "save_every", "save_best", *RETENTION}


def make_plan(
    context: TrainingContext,
    strategies: Strategies,
    options: TrainerOptions,
    given: Set[str],
    arguments: Mapping[str, Any],
    *,
    validates: bool,
    saves_by_default: bool,
) -> Plan:
    """Return the plan of a `fit`, and create or remove the saver of the run.

    Args:
        context: The context of the trainer.
        strategies: The strategies of the trainer, which may divide a run into phases.
        options: The options of the trainer.
        given: The options that the user gave.
        arguments: `max_length`, `validation_period` and `checkpoint_period` of `fit`; None or missing means that the
            options decide.
        validates: True if the trainer has validation data or its own validation.
        saves_by_default: True if the run writes checkpoints even though no option requests them.
    """
    run = context.run
    length, validation = arguments.get("max_length"), arguments.get("validation_period")
    saving = arguments.get("checkpoint_period")
    # By default nothing is written: a folder `checkpoint` must not appear unless the user requested one.
    if saving is None and options.save_every != 0 and (saves_by_default or given & _SAVING_REQUESTS):
        saving = Epochs(1) if options.save_every == -1 else Batches(options.save_every)
    save = _period(saving, "checkpoint_period")
    # A period of 0 turns off the checkpoints of this call.
    if saving is not None and save is None:
        run.saver = None
    elif run.saver is None and (save is not None or options.save_best):
        run.saver = Saver.from_options(options)
    _check_saving(options, given, validates=validates, saves=run.saver is not None)
    planned = Epochs(int(context.config["epochs"])) if length is None else _length(length)
    return Plan(
        max_length=_in_phases(context, strategies, planned),
        validate=_period(validation or Epochs(1), "validation_period") if validates else None,
        save=save,
        report=options.print_every,
    )


def _in_phases(context: TrainingContext, strategies: Strategies, length: TrainUnit) -> TrainUnit:
    """Divide a run into the phases of its strategies, and return its length with all of them."""
    run = context.run
    run.is_detached = False
    if not isinstance(length, Epochs):
        # Strategies may return a single phase for few epochs, so use the largest number.
        run.phases = strategies.phases(sys.maxsize, context)
        if len(run.phases) > 1:
            raise ConfigError(
                f"max_length: {strategies.model_update!r} divides a run into phases of epochs; give a number of "
                f"epochs, not {length}"
            )
        return length
    run.phases = strategies.phases(length.length, context)
    return Epochs(sum(phase.epochs for phase in run.phases)) if len(run.phases) > 1 else length


def _check_saving(options: TrainerOptions, given: Set[str], *, validates: bool, saves: bool) -> None:
    """Raise or warn if an option that was given has no effect in this run."""
    wants_best = (options.save_best and "save_best" in given) or options.keep_best is not None
    if saves and wants_best and not validates:
        name = "save_best" if options.save_best else "keep_best"
        raise ConfigError(f"{name}: this run validates nothing, so no checkpoint is the best; give validation data")
    if not saves and (unused := sorted(given & _SAVING_DETAILS)):
        warnings.warn(
            f"{unused[0]} has no effect: this run writes no checkpoints; give checkpoint_dir", UserWarning, stacklevel=5
        )


def _length(value: TrainUnit | Mapping[str, int]) -> TrainUnit:
    unit = parse_unit(value, "max_length")
    if not isinstance(unit.value, int):
        example = f"{type(unit).__name__}(5)"
        raise ConfigError(f"max_length: expected one whole number such as {example}, got the schedule {unit!r}")
    return unit


def _period(value: TrainUnit | Mapping[str, int] | None, name: str) -> TrainUnit | None:
    """Return a period; None for a period of 0, which is never due."""
    unit = None if value is None else parse_unit(value, name)
    return None if unit is None or unit.value == 0 else unit
