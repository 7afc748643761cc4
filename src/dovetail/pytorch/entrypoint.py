"""Command `python -m dovetail.pytorch.entrypoint module:Class`: trains a trial class with its experiment's settings.

`python -m dovetail.launch module:Class` runs it in one process per slot, and `entrypoint: module:Class` in the file of
an experiment does so for every trial.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from dovetail.config import trial_length
from dovetail.core.train import EarlyExitReason, TrainContext
from dovetail.errors import ConfigError, InvalidHP, UnknownNameError
from dovetail.pytorch.context import init
from dovetail.pytorch.trainer import Trainer
from dovetail.pytorch.trial import PyTorchTrial
from dovetail.units import Batches

_REPORTING = 100


def main(arguments: Sequence[str]) -> int:
    """Train a trial class and return the exit code: 2 if there is no such class."""
    try:
        if len(arguments) != 1:
            raise ConfigError(f"expected one trial class such as model_def:MyTrial, got {' '.join(arguments)!r}")
        trial_class = load_trial_class(arguments[0])
    except ConfigError as error:
        print(f"dovetail.launch: {error}", file=sys.stderr)
        return 2
    # Outside of the `try`: an error of the trial keeps its traceback, and is not mistaken for a wrong name.
    fit_trial_class(trial_class)
    return 0


def load_trial_class(name: str) -> type[PyTorchTrial]:
    """Import a trial class.

    Args:
        name: The module and the class, such as `model_def:MyTrial`.

    Raises:
        ConfigError: There is no such module or class, or the class is no `PyTorchTrial`.

    Example:
        >>> load_trial_class("dovetail.pytorch:Trainer")
        Traceback (most recent call last):
        ...
        dovetail.errors.ConfigError: entrypoint: expected a subclass of dovetail.pytorch.PyTorchTrial, got ...
    """
    module_name, _, attributes = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An import inside of the user's module failed: its traceback shows where.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"entrypoint: expected the name of a module and a class, got {name!r}: {error}") from error
    # A class may be nested in another one.
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            classes = [name for name, value in vars(found).items() if _is_trial_class(value)]
            raise UnknownNameError(f"trial class of {found.__name__} (entrypoint)", attribute, classes)
        found = getattr(found, attribute)
    if not _is_trial_class(found):
        raise ConfigError(
            f"entrypoint: expected a subclass of dovetail.pytorch.PyTorchTrial, got {found!r}: import "
            "dovetail.pytorch in place of determined.pytorch; trials of Keras and DeepSpeed are not trained here"
        )
    return found  # type: ignore[no-any-return]


def fit_trial_class(trial_class: type[PyTorchTrial]) -> dict[str, Any]:
    """Train a class with the settings of its experiment and return the metrics of the last validation.

    `Trainer.fit` reads the periods, the checkpoint policy and the checkpoint to resume from the configuration.
    """
    with init() as context:
        config = context.get_experiment_config()
        try:
            trial = trial_class(context)
        except InvalidHP:
            if context.directory is not None and context.distributed.is_chief:
                # `Trainer.fit` reports this itself, but there is no trainer before the trial is built.
                TrainContext(context.directory, is_chief=True).report_early_exit(EarlyExitReason.INVALID_HP)
            raise
        # Determined's key for the number of batches between two reports.
        reporting = Batches(int(config.get("scheduling_unit", _REPORTING)))
        return Trainer(trial, context).fit(max_length=trial_length(config), reporting_period=reporting)


def _is_trial_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, PyTorchTrial) and value is not PyTorchTrial


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
