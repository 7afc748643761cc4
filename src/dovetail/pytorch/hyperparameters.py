"""Hyperparameters of a trial, with helpful errors for missing names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.errors import UnknownNameError

if TYPE_CHECKING:
    from dovetail.pytorch.context import PyTorchTrialContext


class MissingHyperparameterError(UnknownNameError, KeyError):
    """Raised when a trial reads a hyperparameter that was not given."""

    # `KeyError` would show the message in quotes, with escapes.
    __str__ = Exception.__str__


class Hyperparameters(dict[str, Any]):
    """A dictionary of hyperparameters. The error for a missing name lists the ways to give it.

    Example:
        >>> Hyperparameters(learning_rate=0.1)["learning_rat"]
        Traceback (most recent call last):
        ...
        dovetail.pytorch.hyperparameters.MissingHyperparameterError: ...
    """

    def __missing__(self, name: str) -> Any:
        error = MissingHyperparameterError("hyperparameter", str(name), self)
        error.args = (
            f"{error.args[0]}; give it by init(hparams={{{name!r}: …}}), by --hparam {name}=… of dovetail.launch, or "
            "in the hyperparameters of the configuration",
        )
        raise error


def with_defaults(hparams: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `hparams` completed with the missing names of `defaults`, also in nested mappings.

    Example:
        >>> with_defaults({"net": {"width": 8}}, {"net": {"depth": 2}, "seed": 1})
        {'net': {'depth': 2, 'width': 8}, 'seed': 1}
    """
    nested = {
        name: with_defaults(value, defaults[name])
        for name, value in hparams.items()
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping)
    }
    # `nested` last, because its mappings contain the values of both.
    return {**defaults, **hparams, **nested}


class TrainingView:
    """The hyperparameters of a training script, as `context.training`."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    @property
    def hparams(self) -> Hyperparameters:
        """Hyperparameters by name."""
        return self._context.hparams
